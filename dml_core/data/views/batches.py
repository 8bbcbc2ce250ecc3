"""Index arrays to stacked tensors, in this process or through torch's DataLoader; the tensors are the same either way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dml_core.data.store.rows import Box
from dml_core.data.views.transform_config import TransformConfig
from dml_core.data.views.transforms import test_view, train_view
from dml_core.errors import ConfigError

Indices = np.ndarray[Any, np.dtype[np.int64]]
View = Callable[[Tensor, Box | None, int, int], Tensor]
Batch = tuple[Tensor, Indices]


class ImageSource(Protocol):
    """What a batch needs of a dataset; `PackedDataset` is one."""

    def image(self, index: int) -> Tensor:
        """uint8 (3, H, W)."""

    def box(self, index: int) -> Box | None:
        """(left, top, right, bottom) or None."""


@dataclass(frozen=True)
class TrainView:
    """Training views of one epoch: a picklable function of (image, box, index, copy)."""

    config: TransformConfig
    seed: int
    epoch: int

    def __call__(self, image: Tensor, box: Box | None, index: int, copy: int = 0) -> Tensor:
        """See `transforms.train_view`; refuses an image without a box where the configuration crops to it."""
        _require_box(self.config, box, index)
        return train_view(image, self.config, self.seed, self.epoch, index, box, copy)


@dataclass(frozen=True)
class TestView:
    """Test views: a picklable function of (image, box, index, copy), the same for every copy."""

    config: TransformConfig

    def __call__(self, image: Tensor, box: Box | None, index: int, copy: int = 0) -> Tensor:
        """See `transforms.test_view`; refuses an image without a box where the configuration crops to it."""
        _require_box(self.config, box, index)
        return test_view(image, self.config, box)


def _require_box(config: TransformConfig, box: Box | None, index: int) -> None:
    if config.crop_to_box and box is None:
        raise ConfigError(f"crop_to_box is set, but image {index} has no box; choose a dataset with boxes or leave crop_to_box out")


def count_copies(batches: Sequence[Indices]) -> list[Indices]:
    """For every index of an epoch's batches, how often it came before, so that each time an image has a view of its own."""
    order = np.concatenate(batches)
    by_index = np.argsort(order, kind="stable")  # an image's places beside each other, in the order of the epoch
    is_first = np.diff(order[by_index], prepend=-1) != 0
    places = np.arange(len(order))
    copies = np.empty_like(order)
    copies[by_index] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return np.split(copies, np.cumsum([len(batch) for batch in batches])[:-1])


def iterate_batches(
    dataset: ImageSource, batches: Sequence[Indices], view: View, num_loader_workers: int, copies: Sequence[Indices] | None = None
) -> Iterator[Batch]:
    """Yield (images, indices) for each index array: images is float32 (n, 3, H, W), n = len(indices), which may be 0.

    Args:
        dataset: where images come from.
        batches: dataset indices of each batch, in order.
        view: `TrainView` or `TestView`; it must give one size for all images of a batch.
        num_loader_workers: processes that decode ahead; 0 works in this process.
        copies: of each index, how often it came before (`count_copies`); None where no image comes twice.

    Raises:
        ConfigError: the views of a batch differ in size.
    """
    source = _Batches(dataset, batches, view, copies or [np.zeros_like(batch) for batch in batches])
    if num_loader_workers == 0:
        for number in range(len(batches)):
            yield source[number]
    else:
        # The sampler yields the number of a whole batch, so a loader worker returns it stacked and nothing is collated again.
        yield from DataLoader(source, batch_size=None, shuffle=False, num_workers=num_loader_workers, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Batches(Dataset[Batch]):
    def __init__(self, dataset: ImageSource, batches: Sequence[Indices], view: View, copies: Sequence[Indices]) -> None:
        self.dataset = dataset
        self.batches = batches
        self.view = view
        self.copies = copies

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        indices, copies = self.batches[number], self.copies[number]
        # An empty shard still has the shape of the others; image 0 shows it.
        first = self._view(int(indices[0]), int(copies[0])) if len(indices) else self._view(0, 0)
        # Written in place: a list of views, stacked, would hold the batch twice and leave the cache.
        images = first.new_empty((len(indices), *first.shape))
        for position, (index, copy) in enumerate(zip(indices, copies, strict=True)):
            view = self._view(int(index), int(copy)) if position else first
            if view.shape != first.shape:
                raise ConfigError(f"views of one batch are {tuple(first.shape)} and {tuple(view.shape)}; set crop_size or a fixed resize")
            images[position] = view
        return images, indices

    def _view(self, index: int, copy: int) -> Tensor:
        return self.view(self.dataset.image(index), self.dataset.box(index), index, copy)
