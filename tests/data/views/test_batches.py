"""Batches: the same tensors in this process and through loader workers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dml_core.data.store.packed import PackedDataset
from dml_core.data.views import batches as batches_module
from dml_core.data.views.batches import iterate_batches
from dml_core.data.views.transform_config import TransformConfig
from dml_core.data.views.transforms import train_view
from dml_core.errors import ConfigError

VIEW = batches_module.TrainView(TransformConfig(crop="padded", padding=2, crop_size=32, flip=True), seed=1, epoch=2)
BATCHES = [np.array([3, 1, 7]), np.array([], dtype=np.int64), np.array([14, 0])]


def test_stacks_the_views_of_the_indices(packed_synthetic: Path) -> None:
    dataset = PackedDataset(packed_synthetic, "train")
    found = list(iterate_batches(dataset, BATCHES, VIEW, 0))
    assert [indices.tolist() for _, indices in found] == [[3, 1, 7], [], [14, 0]]
    assert [images.shape for images, _ in found] == [(3, 3, 32, 32), (0, 3, 32, 32), (2, 3, 32, 32)]
    assert torch.equal(found[0][0][2], train_view(dataset.image(7), VIEW.config, 1, 2, 7))


def test_loader_workers_change_nothing(packed_synthetic: Path) -> None:
    dataset = PackedDataset(packed_synthetic, "train")
    here, there = (list(iterate_batches(dataset, BATCHES, VIEW, workers)) for workers in (0, 2))
    for (images_a, indices_a), (images_b, indices_b) in zip(here, there, strict=True):
        assert torch.equal(images_a, images_b)
        assert isinstance(indices_b, np.ndarray)
        assert np.array_equal(indices_a, indices_b)


def test_views_of_different_sizes_are_refused(packed_synthetic: Path) -> None:
    dataset = PackedDataset(packed_synthetic, "test")
    view = batches_module.TestView(TransformConfig(crop_to_box=True))
    with pytest.raises(ConfigError, match="set crop_size or a fixed resize"):
        list(iterate_batches(dataset, [np.arange(15)], view, 0))


def test_cropping_to_boxes_that_are_not_there_is_refused(packed_synthetic: Path) -> None:
    class WithoutBoxes(PackedDataset):
        def box(self, index: int) -> None:
            return None

    config = TransformConfig(crop_to_box=True)
    for view in (batches_module.TestView(config), batches_module.TrainView(config, 0, 0)):
        with pytest.raises(ConfigError, match="image 4 has no box"):
            list(iterate_batches(WithoutBoxes(packed_synthetic, "test"), [np.array([4])], view, 0))


def test_box_reaches_the_view(packed_synthetic: Path) -> None:
    dataset = PackedDataset(packed_synthetic, "test")
    view = batches_module.TestView(TransformConfig(crop_to_box=True))
    ((images, _),) = iterate_batches(dataset, [np.array([4])], view, 0)
    left, top, right, bottom = dataset.box(4) or (0, 0, 0, 0)
    assert images.shape[2:] == (bottom - top, right - left)
