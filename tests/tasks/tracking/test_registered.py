"""The answer of MLflow's registry if a model's file is missing."""

from pathlib import Path

import pytest

from dml_core.errors import TrackingError
from tasks.tracking.registered import Registry


def test_a_model_without_its_files_is_one_line_without_the_address_s_password(tmp_path: Path) -> None:
    registry = Registry("http://me:word@127.0.0.1:9")
    said = r"^MLflow at http://127\.0\.0\.1:9: model m has no network of this project \(The following failures occurred [^\n]+\)$"
    with pytest.raises(TrackingError, match=said):
        registry._download(f"file://{tmp_path}/nowhere", str(tmp_path), "model m has no network of this project")
