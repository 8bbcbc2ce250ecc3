"""A project at a path of unusual letters, in no git checkout: a run trains, is published, and writes nothing elsewhere."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.conftest import make_project

UNUSUAL = "a b ü#%41"


@pytest.mark.slow
def test_a_run_in_an_exported_tree_at_an_unusual_path(tmp_path: Path) -> None:
    origin = make_project(tmp_path / "origin", ("softtriple",))
    origin.change(scale={"num_workers": 1}, comparison={"protocol": {"num_epochs": 1}})
    origin.commit("small")
    root = tmp_path / UNUSUAL / "project"
    root.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=origin.root, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract", "--directory", str(root)], input=archive, check=True)
    exported = replace(origin, root=root, environment=origin.environment | {"PYTHONPATH": str(root)})
    config = (root / ".dvc/config").read_bytes()
    printed = exported.run("dml", "run", "synthetic", "softtriple")
    assert "does not answer" not in printed
    assert "recall@1" in exported.run("dml", "models")
    assert sorted(path.name for path in tmp_path.iterdir()) == [UNUSUAL, "origin"]
    assert [path.name for path in root.parent.iterdir()] == ["project"]
    assert (root / ".dvc/config").read_bytes() == config
    assert (root / "state/mlflow.db").is_file()
    assert (root / "state/prefect/prefect.db").is_file()
