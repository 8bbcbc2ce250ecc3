"""MLflow's registry: where it is, and its answer if the database or a model's file is missing."""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dml_core.errors import TrackingError
from tasks.tracking.connection import open_client
from tasks.tracking.registered import Registry


def test_a_model_without_its_files_is_one_line_without_the_address_s_password(tmp_path: Path) -> None:
    registry = Registry("http://me:word@127.0.0.1:9")
    said = r"^MLflow at http://127\.0\.0\.1:9: model m has no network of this project \(The following failures occurred [^\n]+\)$"
    with pytest.raises(TrackingError, match=said):
        registry._download(f"file://{tmp_path}/nowhere", str(tmp_path), "model m has no network of this project")


def test_a_reader_creates_no_database(tmp_path: Path) -> None:
    """It would take half a minute, and a database of which the creation was cut off is of no use any more."""
    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db")
    for read in (lambda: registry.fetch("models:/dml-x@best", tmp_path), lambda: registry.fetch_trained("0" * 32, tmp_path)):
        with pytest.raises(TrackingError, match=r"^MLflow's database sqlite:///\S+/mlflow\.db is missing; dml reproduce creates it, or"):
            read()
    assert list(tmp_path.iterdir()) == []


def test_models_are_registered_where_they_are_looked_for(tmp_path: Path, mlflow_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"sqlite:///{tmp_path}/other.db")
    shutil.copy(mlflow_database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    open_client(uri, tmp_path / "state").create_registered_model("dml-x")
    assert [model.name for model in MlflowClient(uri, registry_uri=uri).search_registered_models()] == ["dml-x"]
    assert not (tmp_path / "other.db").exists()
