"""A command whose runs are all finished starts neither Prefect nor Ray; if anything is missing, it is made again."""

import os
import re
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.damage import contents
from tests.e2e.conftest import Project, steps_run
from tests.hidden import hiding

pytestmark = pytest.mark.slow
COMMAND = ("dml", "reproduce", "--dataset", "synthetic")


@pytest.fixture(scope="module")
def first(project: Project) -> str:
    return project.run(*COMMAND)


def page(printed: str) -> str:
    """Return what follows the progress: the report."""
    return re.sub(r"steps run: .*", "", printed[printed.index("# comparison on") :])


def test_reused_runs_load_neither_prefect_nor_ray_nor_torch_and_print_the_same_report(project: Project, first: str, tmp_path: Path) -> None:
    database = project.root / "state/mlflow.db"
    before = contents(project.root / "results"), database.read_bytes()
    without = hiding(tmp_path / "hidden", ["prefect", "ray", "torch"], project.root)
    again = project.run(*COMMAND, **without)
    assert "starting" not in again
    assert "2 of 2 runs reused" in again
    assert steps_run(again) == {}
    assert page(again) == page(first)
    assert (contents(project.root / "results"), database.read_bytes()) == before
    assert "train: reused" in project.run("dml", "run", "synthetic", "softtriple", **without)


@pytest.mark.proof
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


@pytest.mark.proof
def test_a_changed_byte_of_a_network_trains_again_though_the_file_looks_the_same(project: Project, first: str) -> None:
    (folder,) = (Path(path) for path in re.findall(r"network: (.*)", project.run("dml", "run", "synthetic", "softtriple")))
    network = folder / "checkpoint.pt"
    data, state = network.read_bytes(), network.stat()
    network.write_bytes(bytes([*data[:1000], data[1000] ^ 1, *data[1001:]]))
    os.utime(network, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert steps_run(project.run(*COMMAND)) == {"train": 1}
    assert network.read_bytes() == data
