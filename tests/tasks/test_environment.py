"""Addresses and texts of others as they may be shown, and what every process's environment is."""

import os
from pathlib import Path

import pytest

from tasks.environment import Project, set_environment, shown, without_secrets


def test_an_address_is_shown_without_its_user_and_query() -> None:
    assert shown("postgresql+psycopg2://u:p@h:1/db?sslkey=k") == "postgresql+psycopg2://h:1/db"
    assert shown("s3://bucket/prefix") == "s3://bucket/prefix"
    assert shown("sqlite:////srv/state/mlflow.db") == "sqlite:////srv/state/mlflow.db"
    assert shown("h:6379") == "h:6379"


def test_a_text_of_others_is_shown_without_the_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_SECRET_ACCESS_KEY": "planted-s3",
        "PREFECT_API_AUTH_STRING": "admin:planted-prefect",
        "MLFLOW_TRACKING_URI": "postgresql://dml:planted-database@db/mlflow",
        "RAY_AUTH_TOKEN": "1",
        "RAY_AUTH_MODE": "token-of-no-secret",
    }.items():
        monkeypatch.setenv(name, value)
    said = "to postgresql://dml:planted-database@db/mlflow; planted-s3, admin:planted-prefect, planted-prefect, planted-database"
    assert without_secrets(said) == "to postgresql://db/mlflow; ***, ***, ***, ***"
    plain = "step 1 of 10: token-of-no-secret, mail@example.org, https://example.org/@page"
    assert without_secrets(plain) == plain


def test_libraries_are_made_to_load_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD", None)
    set_environment(Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "sqlite:///x"))
    assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
