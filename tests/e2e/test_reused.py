"""Of a finished comparison, what was deleted or damaged is made again; `test_standing_comparison.py` reuses one that is intact."""

import os
import re
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.e2e.conftest import Project, steps_run

pytestmark = [pytest.mark.slow, pytest.mark.proof]
COMMAND = ("dml", "reproduce", "--dataset", "synthetic")


@pytest.fixture(scope="module")
def first(project: Project) -> str:
    return project.run(*COMMAND)


def test_what_was_deleted_is_made_again(project: Project, first: str) -> None:
    report = project.root / "results/synthetic/report.md"
    text = report.read_bytes()
    report.unlink()
    assert "starting" not in project.run(*COMMAND)
    assert report.read_bytes() == text
    client = MlflowClient(f"sqlite:///{project.root / 'state/mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name LIKE '%synthetic%'")
    (run,) = client.search_runs([experiment.experiment_id], "params.variant = 'softtriple'")
    client.delete_run(run.info.run_id)
    project.run(*COMMAND)
    assert client.get_run(run.info.run_id).info.lifecycle_stage == "active"


def test_a_changed_byte_of_a_network_trains_again_though_the_file_looks_the_same(project: Project, first: str) -> None:
    (folder,) = (Path(path) for path in re.findall(r"network: (.*)", project.run("dml", "run", "synthetic", "softtriple")))
    network = folder / "checkpoint.pt"
    data, state = network.read_bytes(), network.stat()
    network.write_bytes(bytes([*data[:1000], data[1000] ^ 1, *data[1001:]]))
    os.utime(network, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert steps_run(project.run(*COMMAND)) == {"train": 1}
    assert network.read_bytes() == data
