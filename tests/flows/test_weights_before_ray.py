"""A GPU, weights or a dataset that are missing, and weights that are damaged or of another network, end a flow before Ray starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dml_core.errors import ConfigError, DataError
from dml_core.files import file_sha256
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.published import PUBLISHED
from dml_core.models.backbones.registry import build_backbone
from flows import chain, reproduce
from tasks import checks
from tasks.runs.costs import Meter
from tasks.runs.identity import train_step
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.tables.file import load_table
from tasks.tables.runs import runs_of
from tests.damage import flip

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
    expected: list[int] = []
    display, workers = SimpleNamespace(say=print), SimpleNamespace(expected=expected, expect=expected.append)
    project = SimpleNamespace(state=tmp_path)
    options = {"force": False, "code": "strict", "scale": ScaleSpec(), "meter": Meter(tmp_path)}
    return SimpleNamespace(project=project, display=display, workers=workers, **options)


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


def with_weights(spec: RunSpec, path: Path) -> RunSpec:
    """Return the run from a file of weights, whose hash is given."""
    backbone = BackboneConfig(name="lenet", weights=str(path), weights_sha256=file_sha256(path))
    model = spec.training.model.model_copy(update={"backbone": backbone})
    return spec.model_copy(update={"training": spec.training.model_copy(update={"model": model})})


def test_weights_of_another_network(spec, services, tmp_path) -> None:
    torch.save({"conv1.weight": torch.zeros(2, 3, 5, 5)}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=r"softtriple/table1: .*weights '.*w\.pth' do not fit the backbone: 3 missing .*; 1 wrong shape"):
        run_chains(with_weights(spec, tmp_path / "w.pth"), services)


def test_a_file_that_changed_since_its_hash_was_written(spec, services, tmp_path) -> None:
    torch.save(build_backbone(BackboneConfig(name="lenet")).state_dict(), tmp_path / "w.pth")
    changed = with_weights(spec, tmp_path / "w.pth")
    flip(tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="they are damaged or others"):
        run_chains(changed, services)


@pytest.mark.parametrize("missing", ["weights", "dataset", "nothing"])
def test_ray_starts_early_only_if_nothing_that_may_be_missing_is(missing, spec, services, monkeypatch) -> None:
    """Fetching a dataset can fail, so it ends before Ray starts; a dataset that is at hand is updated while Ray starts."""
    done: list[str] = []

    def prepared(runs: Any, params: Any, services: Any) -> DatasetRecord:
        done.append("dataset")
        if missing == "dataset":
            raise DataError("dvc repro failed: no network")
        return RECORD

    services.start_workers_early = lambda num_to_train, _: done.append(f"Ray for {num_to_train}")
    services.project.packed = lambda name: Path("/nowhere")
    monkeypatch.setattr(reproduce, "_prepare", prepared)
    monkeypatch.setattr(reproduce, "is_at_hand", lambda *_: missing == "nothing")
    if missing == "nothing":
        spec = spec.model_copy(update={"training": spec.training.without_weights()})
        assert reproduce._prepare_all([spec], None, services) == {"cub200": RECORD}
        assert done == ["Ray for 1", "dataset"]
        assert services.workers.expected == [1]
        return
    if missing == "dataset":
        spec = spec.model_copy(update={"training": spec.training.without_weights()})
    with pytest.raises((ConfigError, DataError), match=r"put bn_inception|no network"):
        reproduce._prepare_all([spec], None, services)
    assert done == (["dataset"] if missing == "dataset" else [])


@pytest.mark.parametrize("at_hand", [True, False])
def test_of_several_datasets_one_that_cannot_be_prepared_fails_its_own_runs(at_hand, spec, services, monkeypatch) -> None:
    def prepared(runs: Any, params: Any, services: Any) -> DatasetRecord:
        if runs[0].dataset != "sop":
            raise DataError(f"{runs[0].dataset}: damaged")
        return RECORD

    lines: list[str] = []
    started: list[int] = []
    services.display.say = lines.append
    services.start_workers_early = lambda num_to_train, _: started.append(num_to_train)
    services.project.packed = lambda name: Path("/nowhere")
    monkeypatch.setattr(reproduce, "_prepare", prepared)
    monkeypatch.setattr(reproduce, "is_at_hand", lambda *_: at_hand)
    monkeypatch.setattr(reproduce, "run_chains", lambda runs, *_: ([run.dataset for run in runs], ["a run's failure"]))
    monkeypatch.setattr(
        reproduce, "search_notes", lambda params, runs, prepared: [f"searched on other images of {name}" for name in prepared]
    )
    damaged = spec.model_copy(update={"training": spec.training.without_weights()})
    runs = [damaged, damaged.model_copy(update={"dataset": "sop"}), damaged.model_copy(update={"seed": 1})]
    unprepared: dict[str, DataError] = {}
    assert reproduce._prepare_all(runs, None, services, unprepared) == {"sop": RECORD}
    assert list(unprepared) == ["cub200"]
    assert started == services.workers.expected == [3 if at_hand else 1], "Ray starts while datasets that are at hand are updated"
    assert lines == ["cub200 cannot be prepared, so its runs fail: cub200: damaged", "note: searched on other images of sop"]
    outcomes, failures = reproduce._run_prepared(runs, {"sop": RECORD}, unprepared, services)
    assert outcomes == ["sop"]
    assert [(failure.spec.seed, failure.reason) for failure in failures[:-1]] == [(0, "cub200: damaged"), (1, "cub200: damaged")]
    assert failures[-1] == "a run's failure"
    with pytest.raises(DataError, match="cub200: damaged"):  # no other dataset, or --fail-fast
        reproduce._prepare_all([damaged], None, services, {})
    with pytest.raises(DataError, match="cub200: damaged"):
        reproduce._prepare_all(runs, None, services, None)


def test_weights_are_not_asked_for_where_nothing_is_trained_or_the_workers_are_elsewhere(spec, services, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        with pytest.raises(AttributeError, match="store"):
            run_chains(spec, services)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / train_step(spec, RECORD).identity).write_text("{}")
    with pytest.raises(AttributeError, match="store"):
        run_chains(spec, services)


@pytest.mark.parametrize(
    ("decoder", "device", "says"),
    [
        ("nvjpeg", "auto", r"transform\.decoder: nvjpeg needs a GPU, and torch finds none; check nvidia-smi, or set decoder: cpu"),
        ("nvjpeg", "cuda", r"transform\.decoder: nvjpeg needs a GPU, and torch finds none"),
        ("nvjpeg", "cpu", r"transform\.decoder is 'nvjpeg', which needs a GPU, but scale\.device is cpu"),
        ("cpu", "cuda", r"scale\.device: cuda needs a GPU, and torch finds none; check nvidia-smi, or set device: auto"),
        ("cpu", "auto", None),
    ],
)
def test_a_missing_gpu_ends_a_flow_before_ray_starts(decoder, device, says, spec, services, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done: list[str] = []
    services.scale = ScaleSpec(device=device)
    services.start_workers_early = lambda *_: done.append("Ray")
    services.project.packed = lambda name: Path("/nowhere")
    monkeypatch.setattr(reproduce, "_prepare", lambda *_: RECORD)
    monkeypatch.setattr(reproduce, "is_at_hand", lambda *_: True)
    training = spec.training.without_weights()
    transform = training.transform.model_copy(update={"decoder": decoder})
    spec = spec.model_copy(update={"training": training.model_copy(update={"transform": transform})})
    if says is None:
        reproduce._prepare_all([spec], None, services)
        assert done == ["Ray"]
        return
    with pytest.raises(ConfigError, match=f"^softtriple/table1: .*{says}"):
        reproduce._prepare_all([spec], None, services)
    assert done == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    checks.prepare_machine([spec], services.scale, print)
    on_gpu = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update={"device": "cuda"})})
    with pytest.raises(ConfigError, match=r"^softtriple/table1: .*evaluation\.device: cuda needs a GPU on this machine"):
        checks.prepare_machine([on_gpu], services.scale, print)  # the flow's own process scores, after hours of the cluster's GPUs
