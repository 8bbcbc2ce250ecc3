"""Validation splits: class-disjoint, complete, seeded, and saved."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dml_core.config import ConfigError, parse
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.info import read_info
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.split_config import ValidationConfig, held_out_classes, num_held_out
from dml_core.data.store.splits import open_role, save_split, split_classes
from dml_core.errors import StoreError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("splits")
    options = {"num_classes": 20, "images_per_class": 2, "image_size": 16}
    materialise("synthetic", options, root / "raw")
    prepare("synthetic", root / "raw", root / "out", options)
    return root / "out"


def split_of(folder: Path, share: float = 0.3, seed: int = 0) -> dict[str, tuple[str, ...]]:
    return split_classes(folder, ValidationConfig(share=share, seed=seed))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.01, 0.8), seed=st.integers(0, 1000))
def test_the_parts_are_the_training_classes(folder: Path, share: float, seed: int) -> None:
    split = split_of(folder, share, seed)
    assert sorted(split["train"] + split["validation"]) == PackedDataset(folder, "train").class_names
    assert not set(split["train"]) & set(split["validation"])
    assert len(split["validation"]) == max(2, round(share * 10))
    assert split == split_of(folder, share, seed)


def test_seeds_choose_differently_and_each_class_now_and_then(folder: Path) -> None:
    chosen = [split_of(folder, seed=seed)["validation"] for seed in range(50)]
    assert len(set(chosen)) > 25
    assert {name for names in chosen for name in names} == set(PackedDataset(folder, "train").class_names)


def test_parts_read_as_datasets_of_their_own(folder: Path) -> None:
    config = ValidationConfig(share=0.3)
    split, whole = split_classes(folder, config), PackedDataset(folder, "train")
    train, validation = (open_role(folder, role, config) for role in ("train", "validation"))
    assert validation.class_names == list(split["validation"])
    assert (len(train), len(validation)) == (14, 6)
    assert sorted(np.unique(validation.labels)) == [0, 1, 2]
    assert sorted(train.paths + validation.paths) == sorted(whole.paths)
    assert validation.raw_bytes(3) == whole.raw_bytes(whole.paths.index(validation.paths[3]))
    assert open_role(folder, "test", config).paths == PackedDataset(folder, "test").paths
    assert open_role(folder, "train", None).paths == whole.paths
    with pytest.raises(ConfigError, match="no role 'validation'"):
        open_role(folder, "validation", None)


def test_saved(folder: Path, tmp_path: Path) -> None:
    split, config = split_of(folder, seed=4), ValidationConfig(share=0.3, seed=4)
    save_split(folder, config, tmp_path / "run")
    saved = json.loads((tmp_path / "run/validation_split.json").read_text())
    assert saved == {
        "fingerprint": read_info(folder).fingerprint,
        "share": 0.3,
        "seed": 4,
        "train": list(split["train"]),
        "validation": list(split["validation"]),
    }
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        save_split(folder, config, tmp_path / "file")


def test_shares_that_leave_nothing(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"validation.share 0.95 of 10 training classes leaves fewer than two"):
        split_of(folder, 0.95)
    for share in (0.1, 0.9):  # no share leaves two
        with pytest.raises(ConfigError, match=r"^3 training classes are too few to hold two out and train on two others"):
            held_out_classes(["a", "b", "c"], ValidationConfig(share=share))
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(ConfigError, match=r"validation: share"):
            parse(ValidationConfig, {"share": share}, "validation")


def test_unknown_class(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"train has no class '020.Species_20'"):
        len(PackedDataset(folder, "train", ("001.Species_1", "020.Species_20")))


@settings(max_examples=50, deadline=None)
@given(num_classes=st.integers(4, 40), data=st.data(), seed=st.integers(0, 1000))
def test_folds_are_disjoint_and_are_all_classes(num_classes: int, data: st.DataObject, seed: int) -> None:
    names = [f"class {number}" for number in range(num_classes)]
    folds = data.draw(st.integers(2, num_classes // 2))
    parts = [held_out_classes(names, ValidationConfig(folds=folds, fold=fold, seed=seed)) for fold in range(folds)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    sizes = {len(part) for part in parts}
    assert min(sizes) >= 2
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == num_held_out(ValidationConfig(folds=folds, fold=0), num_classes)
    again = [held_out_classes(names[::-1], ValidationConfig(folds=folds, fold=fold, seed=seed)) for fold in range(folds)]
    assert parts == again, "by name, not by order"


def test_seeds_deal_folds_differently() -> None:
    names = [f"class {number}" for number in range(12)]
    assert len({frozenset(held_out_classes(names, ValidationConfig(folds=4, fold=0, seed=seed))) for seed in range(20)}) > 10


def test_a_share_holds_out_what_it_always_did() -> None:
    """The expected classes were computed with the code from before folds existed."""
    names = [f"class {number}" for number in range(10)]
    held_out = held_out_classes(names, ValidationConfig(share=0.3, seed=1))
    assert held_out == set(sorted(names, key=lambda name: hashlib.sha256(f"1 {name}".encode()).digest())[:3])
    assert ValidationConfig(share=0.3, seed=1).model_dump() == {"share": 0.3, "seed": 1}, "identities of runs with a share stay"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "held out in one way"),
        ({"share": 0.2, "folds": 4, "fold": 0}, r"held out in one way: set share \(0.2\), or folds and fold, and the others to null"),
        ({"folds": 4}, "held out in one way"),
        ({"fold": 1}, "held out in one way"),
        ({"share": 0.2, "fold": 1}, "held out in one way"),
        ({"folds": 4, "fold": 4}, "fold 4 of 4 is not there"),
    ],
)
def test_classes_are_held_out_in_one_way(values: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(ValidationConfig, values, "validation")


def test_folds_that_leave_nothing() -> None:
    names = [f"class {number}" for number in range(9)]
    with pytest.raises(ConfigError, match="5 folds of 9 training classes leave some with fewer than two; at most 4"):
        held_out_classes(names, ValidationConfig(folds=5, fold=0))
    with pytest.raises(ConfigError, match="3 training classes cannot be dealt"):
        held_out_classes(names[:3], ValidationConfig(folds=2, fold=0))


def test_a_fold_is_saved_as_one(folder: Path, tmp_path: Path) -> None:
    config = ValidationConfig(folds=3, fold=1, seed=2)
    split = split_classes(folder, config)
    save_split(folder, config, tmp_path)
    saved = json.loads((tmp_path / "validation_split.json").read_text())
    assert (saved["folds"], saved["fold"], saved["seed"]) == (3, 1, 2)
    assert "share" not in saved
    assert len(split["validation"]) == 3
