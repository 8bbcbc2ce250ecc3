"""Validation splits: class-disjoint, complete, seeded, and saved."""

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
from dml_core.data.store.split_config import ValidationConfig
from dml_core.data.store.splits import ClassSplit, open_role, save_split, split_classes
from dml_core.errors import StoreError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("splits")
    options = {"num_classes": 20, "images_per_class": 2, "image_size": 16}
    materialise("synthetic", options, root / "raw")
    prepare("synthetic", root / "raw", root / "out", options)
    return root / "out"


def split_of(folder: Path, share: float = 0.3, seed: int = 0) -> ClassSplit:
    return split_classes(folder, ValidationConfig(share=share, seed=seed))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.01, 0.8), seed=st.integers(0, 1000))
def test_the_parts_are_the_training_classes(folder: Path, share: float, seed: int) -> None:
    split = split_of(folder, share, seed)
    assert sorted(split.train + split.validation) == PackedDataset(folder, "train").class_names
    assert not set(split.train) & set(split.validation)
    assert len(split.validation) == max(2, round(share * 10))
    assert split == split_of(folder, share, seed)


def test_seeds_choose_differently_and_each_class_now_and_then(folder: Path) -> None:
    chosen = [split_of(folder, seed=seed).validation for seed in range(50)]
    assert len(set(chosen)) > 25
    assert {name for names in chosen for name in names} == set(PackedDataset(folder, "train").class_names)


def test_parts_read_as_datasets_of_their_own(folder: Path) -> None:
    config = ValidationConfig(share=0.3)
    split, whole = split_classes(folder, config), PackedDataset(folder, "train")
    train, validation = (open_role(folder, role, config) for role in ("train", "validation"))
    assert validation.class_names == list(split.validation)
    assert (len(train), len(validation)) == (14, 6)
    assert sorted(np.unique(validation.labels)) == [0, 1, 2]
    assert sorted(train.paths + validation.paths) == sorted(whole.paths)
    assert validation.raw_bytes(3) == whole.raw_bytes(whole.paths.index(validation.paths[3]))
    assert open_role(folder, "test", config).paths == PackedDataset(folder, "test").paths
    assert open_role(folder, "train", None).paths == whole.paths
    with pytest.raises(ConfigError, match="no role 'validation'"):
        open_role(folder, "validation", None)


def test_saved(folder: Path, tmp_path: Path) -> None:
    split = split_of(folder, seed=4)
    save_split(split, tmp_path / "run")
    saved = json.loads((tmp_path / "run/validation_split.json").read_text())
    assert saved == {
        "fingerprint": read_info(folder).fingerprint,
        "share": 0.3,
        "seed": 4,
        "train": list(split.train),
        "validation": list(split.validation),
    }
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        save_split(split, tmp_path / "file")


def test_shares_that_leave_nothing(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"validation.share 0.95 of 10 training classes leaves fewer than two"):
        split_of(folder, 0.95)
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(ConfigError, match=r"validation: share"):
            parse(ValidationConfig, {"share": share}, "validation")


def test_unknown_class(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"train has no class '020.Species_20'"):
        len(PackedDataset(folder, "train", ("001.Species_1", "020.Species_20")))
