"""A project with the real catalogue and a drawn, prepared CUB-200-2011."""

import shutil
from pathlib import Path

import pytest
import yaml

from dml_core.config import merge, read_yaml
from dml_core.data.registry import materialise
from tasks.data import prepare_dataset
from tasks.environment import Project, find_project
from tasks.plans.plan import LocalState
from tasks.runs.identity import step_identities
from tasks.runs.params.file import load_params
from tasks.runs.specs import RunSpec
from tasks.tables.file import load_table
from tests.conftest import ROOT

DRAWN = {"num_classes": 4, "images_per_class": 6, "image_size": 24, "num_modes": 1}


def look(project: Project) -> LocalState:
    return LocalState(project, load_params(project.params_file))


def finish_step(local: LocalState, step: str, spec: RunSpec) -> None:
    """Write the files of a finished step: Prefect's record, and a folder in the store."""
    identity = step_identities(spec, local.dataset("cub200", load_table("softtriple/table1")))[step]
    records = local.project.state / "prefect" / "storage"
    records.mkdir(parents=True, exist_ok=True)
    (records / identity).write_text("{}")
    (Path(local.project.store) / step / identity).mkdir(parents=True, exist_ok=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    changes = {"datasets": {"cub200": {"reader": "cub200", "raw": "data/raw/cub200", "options": {"published_counts": False}}}}
    (root / "params.yaml").write_text(yaml.safe_dump(merge(read_yaml(ROOT / "params.yaml"), changes)))
    materialise("synthetic", DRAWN, root / "data/raw/cub200")
    project = Project(root, root / "state", str(root / "state/store"), "")
    prepare_dataset(project, "cub200", load_params(project.params_file).datasets["cub200"])
    return root


@pytest.fixture
def project(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of the prepared project, with an empty torch hub folder."""
    root = tmp_path / "project"
    shutil.copytree(prepared, root)
    monkeypatch.chdir(root)
    for name in ("DML_STATE", "DML_STORE", "DML_WEIGHTS", "PREFECT_LOCAL_STORAGE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(root / "state/prefect"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return find_project()
