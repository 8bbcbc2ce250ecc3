"""Validation splits: class-disjoint, complete, seeded, saved, and bound to their dataset."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dml_core.config import ConfigError
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.splits import load_split, save_split, split_classes
from dml_core.data.store import PackedDataset
from dml_core.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("splits")
    options = {"num_classes": 20, "images_per_class": 2, "image_size": 16}
    materialise("synthetic", options, root / "raw")
    prepare("synthetic", root / "raw", root / "out", options)
    return root / "out"


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.01, 0.8), seed=st.integers(0, 1000))
def test_the_parts_are_the_training_classes(folder: Path, share: float, seed: int) -> None:
    split = split_classes(folder, share, seed)
    assert sorted(split.train + split.val) == PackedDataset(folder, "train").class_names
    assert not set(split.train) & set(split.val)
    assert len(split.val) == max(2, round(share * 10))
    assert split == split_classes(folder, share, seed)


def test_seeds_choose_differently(folder: Path) -> None:
    assert len({split_classes(folder, 0.3, seed).val for seed in range(10)}) > 5


def test_parts_read_as_datasets_of_their_own(folder: Path) -> None:
    split, whole = split_classes(folder, 0.3, 0), PackedDataset(folder, "train")
    train, val = (PackedDataset(folder, "train", classes) for classes in (split.train, split.val))
    assert val.class_names == list(split.val)
    assert (len(train), len(val)) == (14, 6)
    assert sorted(np.unique(val.labels)) == [0, 1, 2]
    assert sorted(train.paths + val.paths) == sorted(whole.paths)
    assert val.raw_bytes(3) == whole.raw_bytes(whole.paths.index(val.paths[3]))


def test_saved_and_read_back(folder: Path, packed_synthetic: Path, tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    split = split_classes(folder, 0.3, 0)
    save_split(split, path)
    assert load_split(path, folder) == split
    with pytest.raises(DataError, match="belongs to another dataset"):
        load_split(path, packed_synthetic)
    path.write_text("{}")
    with pytest.raises(DataError, match="not a saved validation split"):
        load_split(path, folder)
    with pytest.raises(DataError, match="no such file"):
        load_split(tmp_path / "none.json", folder)


@pytest.mark.parametrize("share", [0.0, 0.95, 1.0, -0.1])
def test_shares_that_leave_nothing(folder: Path, share: float) -> None:
    with pytest.raises(ConfigError, match="leaves fewer than two"):
        split_classes(folder, share, 0)


def test_unknown_class(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"train has no class '020.Species_20'"):
        len(PackedDataset(folder, "train", ("001.Species_1", "020.Species_20")))
