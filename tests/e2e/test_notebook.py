"""The example notebook of the documentation runs in a project with the run that it uses."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import yaml
from nbclient import NotebookClient

from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from tasks.environment import Project
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tests.conftest import ROOT
from tests.tasks.models.conftest import OPTIONS, PARAMS, make_run

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A small project with the notebook's run."""
    params: dict[str, Any] = yaml.safe_load(yaml.safe_dump(PARAMS))
    params["datasets"] = {"synthetic": params["datasets"]["own"] | {"raw": "data/raw/synthetic"}}
    comparison = params["comparison"]
    comparison |= {
        "default_datasets": ["synthetic"],
        "datasets": {"synthetic": {}},
        "variants": {"softtriple": {"loss": {"name": "softtriple"}, "num_epochs": 1}},
    }
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "state/store"), "")
    materialise("synthetic", OPTIONS, tmp_path / "data/raw/synthetic")
    prepare("synthetic", tmp_path / "data/raw/synthetic", project.packed("synthetic"), OPTIONS)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    make_run(project, comparison_runs(load_params(project.params_file), "synthetic")[0])
    torch.set_num_threads(before)
    return project


def test_the_notebook_finds_neighbours(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("DML_STATE", "DML_STORE"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(ROOT / "docs/notebooks/find-neighbours.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(project.root)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "synthetic / softtriple / seed 0" in code[0].outputs[-1].data["text/plain"]
    assert "(300, 16)" in code[0].outputs[-1].data["text/plain"]
    printed, picture = code[1].outputs
    lines = printed.text.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("1.000  ")
    assert "image/png" in picture.data
    assert all(cell.execution_count is not None for cell in code)


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(ROOT / "docs/notebooks/find-neighbours.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
