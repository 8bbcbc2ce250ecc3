"""The list of trained networks: sizes from the records of trainings, without torch and MLflow; from checkpoints if a record is missing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dml_core.training.checkpoints import file
from flows.cli import models
from flows.reuse.step_cache import SealedJSON
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.files import write_whole
from tasks.models import listing
from tasks.models.listing import list_models
from tasks.runs import identity
from tasks.runs.finished import record_provenance
from tasks.runs.identity import train_step
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import ScoreRecord
from tests.conftest import ROOT
from tests.damage import DAMAGE
from tests.tasks.models.conftest import make_run

pytestmark = pytest.mark.slow
CODE = """
import json, sys
from flows.cli.app import app
app(["models", "list", "--all"], standalone_mode=False)
print(json.dumps(sorted({"mlflow", "torch", "pandas", "prefect", "ray", "matplotlib", "sqlalchemy"} & set(sys.modules))))
"""


@pytest.fixture
def storage(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prefect's records of the project's trainings, with invented numbers of parameters: 1000, 1001 and 1002."""
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(tmp_path))
    for number, spec in enumerate(comparison_runs(load_params(project.params_file), "own")[:3]):
        record = make_run(project, spec).checkpoint.model_copy(update={"facts": {"num_parameters": 1000 + number}})
        write_whole(tmp_path / record.identity, json.dumps({"metadata": {}, "result": SealedJSON().dumps(record).decode()}))
    return tmp_path


def sizes(project: Project) -> dict[str, tuple[int, int]]:
    return {model.run: (model.num_parameters, model.num_bytes) for model in list_models(project, None, every_seed=True)[0]}


def test_sizes_are_those_of_the_records(project: Project, storage: Path) -> None:
    found = sizes(project)
    assert {run: parameters for run, (parameters, _) in found.items()} == {
        "own/good/0": 1000,
        "own/good/1": 1001,
        "own/untrained/0": 1002,
    }
    checkpoints = [(Path(project.store) / "train" / record.name / "checkpoint.pt").stat().st_size for record in storage.iterdir()]
    assert sorted(num_bytes for _, num_bytes in found.values()) == sorted(checkpoints)
    assert listing.CHECKPOINT_FILE == file.CHECKPOINT_FILE


def test_scores_of_a_former_network_are_not_listed(project: Project, storage: Path) -> None:
    """The network of one run was trained again, and is not scored yet."""
    runs = comparison_runs(load_params(project.params_file), "own")[:3]
    for spec, inputs in zip(runs, (None, "other files", None), strict=True):
        report = make_run(project, spec)
        scores = ScoreRecord(**report.scores.model_dump(include=set(ScoreRecord.model_fields)) | {"inputs": inputs})
        for record in (report.embeddings, scores):
            write_whole(storage / record.identity, json.dumps({"result": SealedJSON().dumps(record).decode()}))
    listed = list_models(project, None, every_seed=True)[0]
    assert {model.run: bool(model.scores) for model in listed} == {"own/good/0": True, "own/good/1": False, "own/untrained/0": True}


def test_runs_of_older_code_are_named_with_the_files_that_have_changed(
    project: Project, storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, dataset = comparison_runs(load_params(project.params_file), "own")[0], read_dataset(project, "own")
    assert not any(model.older_code for model in list_models(project, None, every_seed=True)[0])
    trained = train_step(spec, dataset)
    before = trained.sources()
    record_provenance(project.state, trained)
    monkeypatch.setattr(identity, "source_digest", lambda modules: "edited")
    monkeypatch.setattr(identity, "source_digests", lambda modules: before | {"dml_core/losses/edited.py": "edited"})
    monkeypatch.setattr(models, "open_project", lambda: project)
    try:
        (model,) = list_models(project, None, every_seed=True)[0]
        assert (model.identity, model.older_code) == (trained.identity, ("dml_core/losses/edited.py",))
        models.list_(None)
    finally:
        shutil.rmtree(project.state / "made")
    assert "\nown/good/0: made by other code: dml_core/losses/edited.py\n" in capsys.readouterr().out


@pytest.mark.parametrize("how", DAMAGE)
def test_without_an_intact_record_the_checkpoint_is_read(project: Project, storage: Path, how: str) -> None:
    good = sizes(project)["own/good/1"]
    for path in storage.iterdir():
        DAMAGE[how](path)
    found = sizes(project)
    assert found["own/good/1"][1] == good[1]
    assert found["own/good/1"][0] == found["own/good/0"][0] > 1002


def test_the_command_imports_neither_torch_nor_mlflow(project: Project, storage: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DML_STATE": str(project.state), "MLFLOW_TRACKING_URI": project.tracking_uri}
    done = subprocess.run([sys.executable, "-c", CODE], check=True, cwd=project.root, env=environment, capture_output=True, text=True)
    *shown, modules = done.stdout.splitlines()
    assert json.loads(modules) == []
    assert sum("own/" in line for line in shown) == 3
