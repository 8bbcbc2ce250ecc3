"""Batches: the same tensors in this process and from loader workers."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dml_core.data.store.packed import PackedDataset
from dml_core.data.views import batches as batches_module
from dml_core.data.views.batches import Loader, count_copies
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import ConfigError
from tests.one_view import train_view

VIEW = batches_module.TrainView(TransformConfig(crop="padded", padding=2, crop_size=32, flip=True), seed=1, epoch=2)
BATCHES = [np.array([3, 1, 7]), np.array([], dtype=np.int64), np.array([14, 0])]


def test_stacks_the_views_of_the_indices(packed_synthetic: Path) -> None:
    dataset = PackedDataset(packed_synthetic, "train")
    found = list(Loader(dataset).batches(BATCHES, VIEW))
    assert [indices.tolist() for _, indices in found] == [[3, 1, 7], [], [14, 0]]
    assert [images.shape for images, _ in found] == [(3, 3, 32, 32), (0, 3, 32, 32), (2, 3, 32, 32)]
    assert torch.equal(found[0][0][2], train_view(dataset.image(7), VIEW.config, 1, 2, 7))


def test_loader_workers_change_nothing(packed_synthetic: Path) -> None:
    dataset = PackedDataset(packed_synthetic, "train")
    here, there = (list(Loader(dataset, workers).batches(BATCHES, VIEW)) for workers in (0, 2))
    for (images_a, indices_a), (images_b, indices_b) in zip(here, there, strict=True):
        assert torch.equal(images_a, images_b)
        assert isinstance(indices_b, np.ndarray)
        assert np.array_equal(indices_a, indices_b)


def test_views_of_different_sizes_are_refused(packed_synthetic: Path) -> None:
    dataset = PackedDataset(packed_synthetic, "test")
    view = batches_module.TestView(TransformConfig(crop_to_box=True))
    with pytest.raises(ConfigError, match="set crop and crop_size, or a fixed resize"):
        list(Loader(dataset).batches([np.arange(15)], view))


def test_cropping_to_boxes_that_are_not_there_is_refused(packed_synthetic: Path) -> None:
    class WithoutBoxes(PackedDataset):
        def box(self, index: int) -> None:
            return None

    config = TransformConfig(crop_to_box=True)
    for view in (batches_module.TestView(config), batches_module.TrainView(config, 0, 0)):
        with pytest.raises(ConfigError, match="image 4 has no box; choose a dataset with boxes, packed without stored_size, or leave"):
            list(Loader(WithoutBoxes(packed_synthetic, "test")).batches([np.array([4])], view))


def test_box_reaches_the_view(packed_synthetic: Path) -> None:
    dataset = PackedDataset(packed_synthetic, "test")
    view = batches_module.TestView(TransformConfig(crop_to_box=True))
    ((images, _),) = Loader(dataset).batches([np.array([4])], view)
    left, top, right, bottom = dataset.box(4) or (0, 0, 0, 0)
    assert images.shape[2:] == (bottom - top, right - left)


class Counted:
    """A dataset whose images encode the decoding process and the number of images that it has decoded."""

    def __init__(self, folder: Path) -> None:
        self.dataset, self.num_decoded = PackedDataset(folder, "train"), 0

    def image(self, index: int) -> torch.Tensor:
        self.num_decoded += 1
        return torch.tensor([os.getpid() % 256, os.getpid() // 256 % 256, self.num_decoded], dtype=torch.uint8)[:, None, None]

    def box(self, index: int) -> None:
        return None

    def expect(self, indices: np.ndarray) -> None:
        pass


def test_loader_processes_live_from_epoch_to_epoch_and_end_with_the_loader(packed_synthetic: Path) -> None:
    loader = Loader(Counted(packed_synthetic), num_loader_workers=2)
    plain = batches_module.TestView(TransformConfig(scaling="zero-one"))
    batches = [np.array([number]) for number in range(8)]
    epochs = [[(images.flatten() * 255).round().int().tolist() for images, _ in loader.batches(batches, plain)] for _ in range(3)]
    processes = [{tuple(pixel[:2]) for pixel in epoch} for epoch in epochs]
    assert len(processes[0]) == 2
    assert processes[0] == processes[1] == processes[2]
    assert max(pixel[2] for pixel in epochs[2]) > 8
    children = multiprocessing.active_children()
    assert len(children) == 2
    loader.close()
    assert not multiprocessing.active_children()


def test_closing_a_loader_ends_its_processes_although_an_iteration_of_it_lives(packed_synthetic: Path) -> None:
    """Left to garbage collection, each would be waited for 5 s, at any later time."""
    loader = Loader(PackedDataset(packed_synthetic, "train"), num_loader_workers=2)
    given_up = loader.batches([np.array([index]) for index in range(9)], VIEW)
    next(given_up)
    loader.close()
    assert not multiprocessing.active_children()
    given_up.close()


@pytest.mark.parametrize("num_loader_workers", [0, 2])
def test_what_is_left_of_an_epoch_that_was_given_up_does_not_come_in_the_next(packed_synthetic: Path, num_loader_workers: int) -> None:
    loader = Loader(PackedDataset(packed_synthetic, "train"), num_loader_workers)
    given_up = loader.batches([np.array([index]) for index in range(9)], VIEW)
    assert next(given_up)[1].tolist() == [0]
    assert [indices.tolist() for _, indices in loader.batches(BATCHES, VIEW)] == [[3, 1, 7], [], [14, 0]]


@pytest.mark.parametrize("num_loader_workers", [0, 1])
def test_loading_draws_nothing_from_torch_s_stream(packed_synthetic: Path, num_loader_workers: int) -> None:
    before = torch.get_rng_state()
    list(Loader(PackedDataset(packed_synthetic, "train"), num_loader_workers).batches(BATCHES, VIEW))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_user_s_mistake_is_one_line_from_a_loader_process_too(packed_synthetic: Path) -> None:
    dataset, view = PackedDataset(packed_synthetic, "test"), batches_module.TestView(TransformConfig(crop_to_box=True))
    with pytest.raises(ConfigError, match=r"^views of one batch are .* set crop and crop_size, or a fixed resize$"):
        list(Loader(dataset, 1).batches([np.arange(15)], view))


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=5))
def test_copies_are_counted_over_the_epoch(epoch: list[list[int]]) -> None:
    found = count_copies([np.array(batch, dtype=np.int64) for batch in epoch])
    flat = [index for batch in epoch for index in batch]
    assert [len(copies) for copies in found] == [len(batch) for batch in epoch]
    assert [copy for copies in found for copy in copies] == [flat[:place].count(index) for place, index in enumerate(flat)]


@pytest.mark.parametrize("num_loader_workers", [0, 2])
def test_an_image_that_comes_again_has_another_view(packed_synthetic: Path, num_loader_workers: int) -> None:
    dataset = PackedDataset(packed_synthetic, "train")
    batches = [np.array([3, 1, 3]), np.array([3, 7])]
    (first, _), (second, _) = Loader(dataset, num_loader_workers).batches(batches, VIEW, count_copies(batches))
    views = [first[0], first[2], second[0]]
    assert not any(torch.equal(views[i], views[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(second[0], train_view(dataset.image(3), VIEW.config, 1, 2, 3, copy=2))
    once = [first[0], first[1], second[1]]  # an image's first view depends only on its index
    assert all(torch.equal(view, train_view(dataset.image(i), VIEW.config, 1, 2, i)) for view, i in zip(once, (3, 1, 7), strict=True))
