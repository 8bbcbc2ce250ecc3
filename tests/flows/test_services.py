"""Services that a flow's steps share."""

import os
import socket
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.chain
from flows.services import Services
from tasks.environment import Project
from tasks.runs.replaced_data import users
from tasks.runs.specs import ScaleSpec


def test_a_dataset_is_in_use_until_the_end_of_the_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr("flows.services.update_dataset", lambda *_: None)
    monkeypatch.setattr("flows.services.read_dataset", lambda of, name: name)
    with closing(Services(project, ScaleSpec())) as services:
        assert users(project, "birds") == ""
        assert services.use_dataset("birds") == "birds"
        assert users(project, "birds") == f"process {os.getpid()}"
        monkeypatch.setattr("tasks.runs.replaced_data.gethostname", lambda: "another-node")
        assert users(project, "birds") == f"process {os.getpid()} on {socket.gethostname()}", "a number says nothing on another machine"
    assert users(project, "birds") == ""


def test_a_run_names_the_data_that_it_used_whatever_becomes_of_dvc_lock_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge conflict in it failed every run that ended meanwhile."""
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr("flows.services.update_dataset", lambda *_: None)
    monkeypatch.setattr("flows.services.read_dataset", lambda of, name: SimpleNamespace(name=name))
    for name in ("RunReport", "read_scores", "published_identity"):
        monkeypatch.setattr(flows.chain, name, lambda *_, **fields: SimpleNamespace(**fields))
    spec: Any = SimpleNamespace(title="", comparison="", label="", seed=0, tags={}, trial=None, model_dump=lambda **_: {})
    dvc_lock, reports = tmp_path / "dvc.lock", list[Any]()
    with closing(Services(project, ScaleSpec())) as services:
        monkeypatch.setattr(services.store, "checked", lambda _: None)
        monkeypatch.setattr(services.tracker, "publish", reports.append)
        monkeypatch.setattr(services, "tags", {})
        for text in ("stages: {prepare@birds: {outs: [{md5: 1a.dir}]}}\n", "<<<<<<< HEAD\n"):
            dvc_lock.write_text(text)
            dataset = services.use_dataset("birds")
            dvc_lock.write_text("<<<<<<< HEAD\n")
            parts: list[Any] = [spec, dataset, None, None, SimpleNamespace(identity=""), services, ()]
            flows.chain.publish.fn(*parts)
    assert [report.dvc_digest for report in reports] == ["1a.dir", "1a.dir"]


@pytest.mark.parametrize("when", ["always", "from the middle of the flow"])
def test_a_flow_uses_packed_data_that_can_only_be_read(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere: a file stands for the folder of locks that cannot be written."""
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr("flows.services.update_dataset", lambda *_: None)
    monkeypatch.setattr("flows.services.read_dataset", lambda of, name: name)
    locks = project.packed("birds").with_name(".birds.users")
    locks.parent.mkdir(parents=True)
    if when == "always":
        locks.touch()
    services, closed = Services(project, ScaleSpec()), list[bool]()
    monkeypatch.setattr(services.display, "close", lambda: closed.append(True))
    assert services.use_dataset("birds") == "birds"
    if when != "always":
        locks.rename(tmp_path / "gone")
        locks.touch()
    services.close()
    assert closed == [True]


@pytest.mark.parametrize("cluster", [None, "head:6379"])
def test_code_that_scores_is_loaded_while_runs_train(cluster: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise be loaded as it is edited during the training, and its scores count as those of the code before."""
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/mlflow.db")
    loaded: list[str] = []
    monkeypatch.setattr("flows.services.import_module", loaded.append)
    monkeypatch.setattr("tasks.workers.pool.Workers._open", lambda self: None)
    if cluster is not None:
        monkeypatch.setenv("RAY_ADDRESS", cluster)
    with closing(Services(project, ScaleSpec())) as services:
        monkeypatch.setattr(services.tracker, "load", lambda: loaded.append("end"))
        services.start_workers_early(1, ["unique_centres"])
        until = time.monotonic() + 60
        while "end" not in loaded and time.monotonic() < until:
            time.sleep(0.01)
    assert {
        "tasks.scores.evaluation",
        "dml_core.evaluation.evaluator",
        "tasks.scores.figures",
        "dml_core.measurements.unique_centres",
        "end",
    } <= {*loaded}
