"""A killed Ray worker, and damaged files of every kind: the run ends with the same files, bit for bit."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.damage import contents, cut, flip, garble
from tests.e2e.conftest import make_project

pytestmark = pytest.mark.slow


def metrics_of(state: Path) -> dict[str, float]:
    (path,) = (state / "store/evaluate").glob("*/metrics.json")
    return json.loads(path.read_text())


def history_of(state: Path) -> str:
    (path,) = (state / "store/train").glob("*/history.jsonl")
    return path.read_text()


def training_workers(driver: psutil.Process) -> list[psutil.Process]:
    """The processes of Ray's training workers below a driver, by the title that Ray gives them."""
    return [child for child in driver.children(recursive=True) if "RayTrainWorker" in " ".join(child.cmdline())]


def test_a_killed_worker_costs_nothing_but_time(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", ("softtriple",))
    project.change(comparison={"protocol": {"num_epochs": 12}, "datasets": {"synthetic": {"num_epochs": 12}}})
    project.run("dml", "run", "synthetic", "softtriple", DML_STATE=str(tmp_path / "undisturbed"))

    process = project.start("dml", "run", "synthetic", "softtriple", DML_STATE=str(tmp_path / "killed"))
    deadline = time.monotonic() + 600
    while not list((tmp_path / "killed/store/train").glob("*/checkpoint.pt")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.02)
    workers = training_workers(psutil.Process(process.pid))
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGKILL)
    num_steps_at_the_kill = len(history_of(tmp_path / "killed").splitlines())
    printed, _ = process.communicate(timeout=1200)

    assert process.returncode == 0, printed
    assert num_steps_at_the_kill < len(history_of(tmp_path / "undisturbed").splitlines())
    assert history_of(tmp_path / "killed") == history_of(tmp_path / "undisturbed")
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "undisturbed")

    expected = contents(tmp_path / "undisturbed/store")
    assert contents(tmp_path / "killed/store") == expected
    damage_much(tmp_path / "killed")
    printed = project.run("dml", "run", "synthetic", "softtriple", DML_STATE=str(tmp_path / "killed"))
    assert contents(tmp_path / "killed/store") == expected
    assert "checkpoint.pt: the checkpoint is damaged" in printed
    assert "begins from the initial weights" in printed
    assert "the record of a finished embed is damaged; the step runs again" in printed
    assert "prefect.db.damaged and made anew" in printed
    assert {line for line in printed.splitlines() if line.endswith(": ran")} == {f"{step}: ran" for step in ("train", "embed", "evaluate")}


def damage_much(state: Path) -> None:
    """A checkpoint, a shard, the scores, Prefect's record of a step, Prefect's database."""
    flip(next((state / "store/train").rglob("checkpoint.pt")))
    cut(next((state / "store/train").rglob("history.jsonl")))
    garble(next((state / "store/embed").rglob("test-00000*.npy")))
    scores = next((state / "store/evaluate").rglob("metrics.json"))
    scores.write_text(scores.read_text().replace("0.", "0.9", 1))
    (kept,) = [path for path in (state / "prefect/storage").iterdir() if "EmbeddingRecord" in path.read_text()]
    cut(kept)
    garble(state / "prefect/prefect.db")
