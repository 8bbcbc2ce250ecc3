"""A store of resized images gives the network exactly the same input as the original images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dml_core.config import ConfigError
from dml_core.data.prepare import prepare
from dml_core.data.registry import parse_dataset
from dml_core.data.store.packed import PackedDataset
from dml_core.data.views import batches as batches_module
from dml_core.data.views.batches import Loader
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import DataError


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of several sizes and shapes, a third of them grayscale."""
    folder, rng = tmp_path_factory.mktemp("raw"), np.random.default_rng(0)
    for name in ("a", "b", "c", "d"):
        (folder / name).mkdir()
        for number in range(3):
            coarse = rng.integers(0, 256, (7, 5, 3), dtype=np.uint8)
            width, height = (int(side) for side in rng.integers(50, 120, 2))
            picture = Image.fromarray(coarse).resize((width, height)).convert("L" if number == 2 else "RGB")
            picture.save(folder / name / f"{number}.jpg")
    return folder


@pytest.mark.parametrize("size", [40, (48, 40)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_views_are_bit_identical(raw: Path, tmp_path: Path, size: Any, interpolation: Any) -> None:
    config = TransformConfig(train_resize=size, test_resize=size, crop="random", crop_size=32, flip=True, interpolation=interpolation)
    views = {}
    for name, options in (("original", {}), ("resized", {"stored_size": size, "stored_interpolation": interpolation})):
        prepare("folder", raw, tmp_path / name, options)
        dataset = PackedDataset(tmp_path / name, "train")
        for view in (batches_module.TrainView(config, 1, 2), batches_module.TestView(config)):
            ((views[name, type(view)], _),) = Loader(dataset).batches([np.arange(6)], view)
    for view_type in (batches_module.TrainView, batches_module.TestView):
        assert torch.equal(views["original", view_type], views["resized", view_type])
    assert {dataset.raw_bytes(index)[:4] for index in range(6)} == {b"\x89PNG"}


def test_boxes_are_dropped_and_sizes_recorded(raw_synthetic: Path, tmp_path: Path) -> None:
    options = {"num_classes": 6, "stored_size": 16}
    info = prepare("synthetic", raw_synthetic, tmp_path / "out", options)
    dataset = PackedDataset(tmp_path / "out", "train")
    assert info.options["stored_size"] == 16
    assert dataset.image(0).shape == (3, 16, 16)
    assert dataset.box(0) is None


def test_damaged_image_and_wrong_size(raw: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "raw" / name).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "raw" / name / f"{number}.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(DataError, match=r"a/0.jpg: cannot be decoded"):
        prepare("folder", tmp_path / "raw", tmp_path / "out", {"stored_size": 16})
    with pytest.raises(ConfigError, match="stored_size"):
        parse_dataset("folder", {"stored_size": 0})
