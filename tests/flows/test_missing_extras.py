"""Without an extra of `pyproject.toml`, verbs that need none of its packages work, and others name it in one line."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flows.cli.exits import EXTRAS
from tests.conftest import ROOT
from tests.hidden import hiding


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    return tmp_path


def dml_without(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `dml` as if no package of any extra were installed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DML_", "MLFLOW_", "PREFECT_"))}
    environment |= hiding(project / "hidden", EXTRAS, ROOT)
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *words], cwd=project, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", [("tables", "softtriple"), ("reproduce", "--help")], ids=" ".join)
def test_what_needs_no_extra_works(project: Path, words: tuple[str, ...]) -> None:
    ran = dml_without(project, *words)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout


@pytest.mark.slow
def test_what_needs_one_ends_with_a_line_that_names_it(project: Path) -> None:
    ran = dml_without(project, "reproduce")
    assert ran.returncode == 2, ran.stderr
    last = ran.stderr.splitlines()[-1]  # after the lines of progress
    assert last == "error: prefect is not installed; in the project's folder: pip install -e '.[pipeline]'"
    assert "Traceback" not in ran.stderr


def test_the_extras_are_those_of_the_project() -> None:
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(optional)
    for module in ("ray", "prefect", "mlflow", "sqlalchemy", "dvc", "boto3", "optuna", "fastapi"):
        assert any(requirement.startswith(module) for requirement in optional[EXTRAS[module]] + optional["pipeline"]), module
