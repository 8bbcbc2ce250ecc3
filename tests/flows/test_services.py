"""Services that a flow's steps share."""

import os
from contextlib import closing
from pathlib import Path

import pytest

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
    assert users(project, "birds") == ""
