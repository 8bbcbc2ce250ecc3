"""The ledger of a real command: its steps add up to the wall clock, also when a worker is killed, and MLflow has every run's cost."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from dml_core.evaluation.metric_info import table_columns
from tests.e2e.conftest import Project, make_project

pytestmark = [pytest.mark.slow, pytest.mark.proof]
WAIT_SECONDS = 600


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str, float]:
    """A run whose worker was killed when its first checkpoint was there: the project, what was printed, and its wall-clock seconds."""
    project = make_project(tmp_path_factory.mktemp("costs"), ("softtriple",))
    project.change(scale={"num_workers": 1}, comparison={"protocol": {"num_epochs": 400}})
    began = time.monotonic()
    process = project.start("dml", "reproduce", "--dataset", "synthetic")
    store = project.root / "state/store/train"
    while not [*store.glob("*/checkpoint.pt")] and time.monotonic() - began < WAIT_SECONDS and process.poll() is None:
        time.sleep(0.05)
    _kill_a_worker(process.pid)
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    seconds = time.monotonic() - began
    assert process.returncode == 0, output
    assert "retrying with new workers" in output
    return project, output, seconds


def _kill_a_worker(flow: int) -> None:
    for process in psutil.Process(flow).children(recursive=True):
        if process.name().startswith("ray::RayTrainWo"):
            os.kill(process.pid, signal.SIGKILL)
            return
    raise AssertionError("no worker was training")


def test_the_steps_add_up_to_the_wall_clock(printed: tuple[Project, str, float]) -> None:
    _, output, seconds = printed
    (line,) = re.findall(r"^time: (.*)$", output, re.MULTILINE)
    total = float(line.partition(" s")[0])
    parts = {name: float(value) for name, value in (part.rsplit(" ", 1) for part in line.partition(": ")[2].split(", "))}
    assert sum(parts.values()) == pytest.approx(total, rel=0.005, abs=0.5)
    assert sum(value for name, value in parts.items() if name != "between steps") >= 0.98 * total
    assert total >= 0.98 * seconds or seconds - total < 15, "the end of the process comes after the line"


def test_mlflow_has_what_the_run_cost_and_what_the_kill_lost(printed: tuple[Project, str, float]) -> None:
    project, _, _ = printed
    client = MlflowClient(f"sqlite:///{project.root / 'state/mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name LIKE '%synthetic%'")
    (run,) = client.search_runs([experiment.experiment_id], "params.variant = 'softtriple'")
    metrics = run.data.metrics
    wall, lost = metrics["cost_train/wall_seconds"], metrics["cost_train/lost_seconds"]
    assert 0 < lost < wall
    assert metrics["cost_train/cpu_seconds"] > 0
    assert metrics["cost_train/peak_memory_bytes"] > 50e6, "a process with torch"
    total = sum(metrics[f"cost_{step}/wall_seconds"] for step in ("train", "embed", "evaluate"))
    assert metrics["cost_total/wall_seconds"] == pytest.approx(total)
    assert not [name for name in table_columns(metrics) if name.startswith("cost")]
    assert not [name for name in run.data.tags if "cost" in name]
    assert not [*Path(project.root / "state/costs").glob("*.json")], "what was kept of steps that have a record"
