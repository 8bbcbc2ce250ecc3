"""A search cannot see test classes: its runs get a dataset without them, and no user setting changes that."""

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from dml_core.config import merge, read_yaml
from dml_core.data.store.info import MANIFEST_FILE
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.split_config import ValidationConfig
from dml_core.data.store.splits import open_role
from dml_core.errors import ConfigError, DmlError
from dml_core.training.validation import ScoredImages, scorers
from tasks.checks import check_parts, check_settings
from tasks.environment import Project
from tasks.runs import protocols
from tasks.runs.params.file import load_params
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import DatasetSpec, Params, RunSpec, ScaleSpec
from tasks.tuning.search import FIRST_SEED, Search, plan_searches
from tasks.tuning.training_rows import training_rows
from tasks.workers.jobs import Job
from tasks.workers.work import embed, train
from tests.conftest import ROOT

TRAINING = {
    "model": {"backbone": {"name": "small_cnn", "width": 8}, "head": {"embedding_dim": 8}},
    "sampler": {"kind": "shuffled", "batch_size": 8},
    "transform": {"crop_size": 24, "padding": 2},
    "num_epochs": 1,
}
TABLE = {
    "title": "A table of the tests",
    "states": "Nothing.",
    "columns": [{"dataset": "synthetic", "metrics": ["recall@1"]}],
    "rows": {
        "row": {
            "label": "A row",
            "kind": "own",
            "published": [None],
            "variants": ["ours"],
            "loss": {"name": "softtriple"},
            "training": TRAINING,
        }
    },
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "")


@pytest.fixture
def alone(packed: Path, project: Project) -> DatasetRecord:
    return training_rows(project, "synthetic", packed)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Params]:
    """Return a function that writes a table `project/own` and `params.yaml` with changes, and returns the parameters."""
    tables = tmp_path / "tables"
    (tables / "project").mkdir(parents=True)
    (tables / "project" / "protocol.yaml").write_text((protocols.TABLES / "project" / "protocol.yaml").read_text())
    for module in ("tasks.runs.protocols", "tasks.tables.file"):
        monkeypatch.setattr(f"{module}.TABLES", tables)

    def written(table: dict[str, object] | None = None, overrides: tuple[str, ...] = (), **params: object) -> Params:
        (tables / "project" / "own.yaml").write_text(yaml.safe_dump(merge(TABLE, table or {})))
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(merge(read_yaml(ROOT / "params.yaml"), params)))
        monkeypatch.chdir(tmp_path)
        return load_params(tmp_path / "params.yaml", overrides)

    return written


def searches(params: Params, packed: Path, row: str = "project/own/row", **options: object) -> list[Search]:
    asked = {"datasets": (), "folds": 2, "seed": 0, "metric": "recall@1"} | options
    return [search.on(packed) for search in plan_searches(params, row, **asked)]


def job(spec: RunSpec, dataset: DatasetRecord, store: Path) -> Job:
    keys = {"dataset_key": "data/x", "train_key": "train/x", "embed_key": "embed/x"}
    return Job(
        step="embed",
        spec=spec,
        dataset_folder=dataset.folder,
        store=str(store),
        cache=str(store / "cache"),
        **keys,
    )


def test_the_dataset_of_a_search_is_the_training_rows_alone(packed: Path, alone: DatasetRecord, project: Project) -> None:
    whole, own = PackedDataset(packed, "train"), PackedDataset(Path(alone.folder), "train")
    assert own.paths == whole.paths
    assert own.class_names == whole.class_names
    assert (own.labels == whole.labels).all()
    assert all(own.raw_bytes(index) == whole.raw_bytes(index) for index in range(len(whole)))
    assert set(pq.read_table(Path(alone.folder) / MANIFEST_FILE)["role"].to_pylist()) == {"train"}
    tests = PackedDataset(packed, "test")
    everything = b"".join(path.read_bytes() for path in Path(alone.folder).rglob("*") if path.is_file())
    assert whole.raw_bytes(0) in everything
    assert not any(tests.raw_bytes(index) in everything for index in range(len(tests)))
    assert alone.counts == {"train": len(whole)}
    assert training_rows(project, "synthetic", packed) == alone, "made once"


def test_what_was_put_in_its_place_is_made_again(packed: Path, alone: DatasetRecord, project: Project) -> None:
    folder = Path(alone.folder)
    for path in packed.iterdir():  # the whole dataset with its test classes, and with valid hashes
        (folder / path.name).write_bytes(path.read_bytes())
    assert training_rows(project, "synthetic", packed) == alone
    with pytest.raises(ConfigError, match="no role 'test'"):
        PackedDataset(folder, "test")
    (folder / MANIFEST_FILE).write_bytes((packed / MANIFEST_FILE).read_bytes())  # only the rows, which contradicts the hash
    assert training_rows(project, "synthetic", packed) == alone
    with pytest.raises(ConfigError, match="no role 'test'"):
        PackedDataset(folder, "test")


def test_every_run_of_a_search_is_scored_on_held_out_training_classes(write: Callable[..., Params], packed: Path) -> None:
    (search,) = searches(write(), packed, folds=2)
    for pair in range(4):
        spec = search.spec(0, search.own, pair)
        assert spec.evaluation.role == "validation"
        assert spec.evaluation.epoch == "last"
        assert spec.training.validation == ValidationConfig(folds=2, fold=pair % 2, seed=FIRST_SEED + pair // 2)
        assert spec.training.keep_epochs == ()
        held_out = open_role(packed, "validation", spec.training.validation).class_names
        assert not set(held_out) & set(PackedDataset(packed, "test").class_names)


def in_row(**row: object) -> dict[str, object]:
    return {"rows": {"row": row}}


@pytest.mark.parametrize(
    "table",
    [
        {"role": "test"},
        in_row(role="test"),
        in_row(role="train"),
        in_row(epochs=["last", "oracle"]),
        in_row(epochs=["oracle"]),
        in_row(training={"keep_epochs": ["oracle"]}),
        in_row(training={"validation": {"share": 0.3}, "keep_epochs": ["best_validation", "oracle"]}),
        in_row(measurements={"retrieved_images": {}}),
    ],
)
def test_what_a_table_may_say_of_scoring_changes_nothing(write: Callable[..., Params], packed: Path, table: dict[str, object]) -> None:
    (plain,) = searches(write(), packed)
    (search,) = searches(write(table), packed)
    assert search.spec(0, search.own, 1) == plain.spec(0, plain.own, 1)


@pytest.mark.parametrize("path", ["evaluation.role", "validation.share", "keep_epochs", "validation", "role", "training.validation.share"])
@pytest.mark.parametrize("where", ["table", "row"])
def test_a_search_over_what_is_read_is_refused(write: Callable[..., Params], packed: Path, path: str, where: str) -> None:
    search = {"search": {path: {"choices": ["test", "validation"]}}}
    with pytest.raises(ConfigError, match="cannot be searched"):
        searches(write(search if where == "table" else in_row(**search)), packed)


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": {"role": "test"}},
        {"evaluation": {"role": "validation"}, "comparison": {"protocol": {"validation": {"share": 0.2}}}},
        {"evaluation": {"role": "train"}},
        {"comparison": {"protocol": {"validation": {"share": 0.2}, "keep_epochs": ["best_validation", "oracle"]}}},
        {"comparison": {"variants": {"softtriple": {"keep_epochs": ["oracle"]}}}},
    ],
)
def test_what_params_say_of_scoring_changes_nothing(write: Callable[..., Params], packed: Path, changes: dict[str, object]) -> None:
    for asked, overrides in ((changes, ()), ({}, ("evaluation.role=train",))):
        (search,) = searches(write(None, overrides, **asked), packed, "project/standing/softtriple", datasets=("synthetic",))
        spec = search.spec(1, search.own, 0)
        assert (spec.evaluation.role, spec.evaluation.epoch) == ("validation", "last")
        assert (spec.training.validation, spec.training.keep_epochs) == (ValidationConfig(folds=2, fold=0, seed=FIRST_SEED), ())


def test_a_dataset_whose_test_classes_are_trained_on_is_refused(write: Callable[..., Params], packed: Path) -> None:
    by_image = {"options": {"split": "images", "num_train_images": 100, "num_test_images": 20}}
    params = write({"columns": [{"dataset": "fashion-mnist", "metrics": ["recall@1"]}]})
    params = params.model_copy(
        update={"datasets": params.datasets | {"fashion-mnist": DatasetSpec(reader="fashion_mnist", raw="x", **by_image)}}
    )
    with pytest.raises(ConfigError, match="its training classes are its test classes"):
        searches(params, packed)


def test_runs_that_ask_for_test_classes_all_the_same_find_none(
    write: Callable[..., Params], packed: Path, alone: DatasetRecord, tmp_path: Path
) -> None:
    """Each access of a run to test classes is tried on the search's dataset, as if the search's own code requested them."""
    (search,) = searches(write(), packed)
    spec = search.spec(0, search.own, 0)
    folder, cpu = Path(alone.folder), torch.device("cpu")
    on_test = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update={"role": "test"})})
    oracle = spec.model_copy(update={"training": spec.training.model_copy(update={"keep_epochs": ("oracle",)})})
    everything = spec.model_copy(update={"training": spec.training.model_copy(update={"validation": None})})
    whole_test = everything.model_copy(update={"evaluation": everything.evaluation.model_copy(update={"role": "test"})})
    doors: list[Callable[[], object]] = [
        lambda: open_role(folder, "test", None),
        lambda: open_role(folder, "query", None),
        lambda: open_role(folder, "gallery", None),
        lambda: scorers(folder, oracle.training, ScoredImages(cpu)),
        lambda: check_settings([on_test], ScaleSpec(), folder),
        lambda: check_settings([whole_test], ScaleSpec(), folder),
        lambda: check_parts([on_test], folder),
        lambda: embed(job(on_test, alone, tmp_path / "store"), cpu, lambda message: None),
        lambda: embed(job(whole_test, alone, tmp_path / "store"), cpu, lambda message: None),
        lambda: train(job(oracle, alone, tmp_path / "store"), cpu, lambda message: None),
    ]
    for door in doors:
        with pytest.raises(DmlError) as refused:
            door()
        assert "\n" not in str(refused.value)
        assert "test" in str(refused.value) or "no role" in str(refused.value)
