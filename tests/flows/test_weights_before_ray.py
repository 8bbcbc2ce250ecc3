"""Missing or damaged published weights end a flow before it makes chains or starts Ray."""

from types import SimpleNamespace
from typing import Any

import pytest

from dml_core.errors import ConfigError
from dml_core.models.backbones.published import PUBLISHED
from flows import chain
from tasks.runs.identity import train_identity
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import RunSpec
from tasks.tables.file import load_table
from tasks.tables.runs import runs_of

RECORD = DatasetRecord(name="cub200", folder="", digest="0", counts={"train": 8, "test": 8}, source="cub200")


@pytest.fixture
def spec(tmp_path, monkeypatch) -> RunSpec:
    """SoftTriple on CUB-200-2011, with an empty weights folder and an unreachable download server."""
    monkeypatch.setenv("DML_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(tmp_path / "records"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    unreachable = PUBLISHED["bn_inception"].__class__("bn_inception-52deb4733.pth", "52deb4733", "http://127.0.0.1:1/w.pth")
    monkeypatch.setitem(PUBLISHED, "bn_inception", unreachable)
    return runs_of("softtriple/table1", load_table("softtriple/table1"))["cub200"][1]


@pytest.fixture
def services(tmp_path) -> Any:
    """Only the services that a flow uses before it makes chains."""
    display = SimpleNamespace(say=print)
    return SimpleNamespace(project=SimpleNamespace(state=tmp_path), display=display, force=False, code="strict")


def run_chains(spec: RunSpec, services: Any) -> None:
    """Run the flow; it raises an AttributeError if it continues, since the services have no store."""
    chain.run_chains([spec], {spec.dataset: RECORD}, services)


def test_missing_weights_that_cannot_be_downloaded(spec, services, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be downloaded .*; put bn_inception-52deb4733\.pth .SHA-256 begins with 52deb4733. at "):
        run_chains(spec, services)


def test_damaged_weights(spec, services, tmp_path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/bn_inception-52deb4733.pth").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="damaged, or another file"):
        run_chains(spec, services)


def test_weights_are_not_asked_for_where_nothing_is_trained_or_the_workers_are_elsewhere(spec, services, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        with pytest.raises(AttributeError, match="store"):
            run_chains(spec, services)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / train_identity(spec, RECORD)).write_text("{}")
    with pytest.raises(AttributeError, match="store"):
        run_chains(spec, services)
