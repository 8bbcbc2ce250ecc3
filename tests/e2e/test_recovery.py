"""Killing a Ray worker in the middle of training: the run goes on from its checkpoint and ends with the same numbers, bit for bit."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

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
