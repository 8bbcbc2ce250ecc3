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
View = Callable[[Tensor, Box | None, int], Tensor]
Batch = tuple[Tensor, Indices]


class ImageSource(Protocol):
    """What a batch needs of a dataset; `PackedDataset` is one."""

    def image(self, index: int) -> Tensor:
        """uint8 (3, H, W)."""

    def box(self, index: int) -> Box | None:
        """(left, top, right, bottom) or None."""


@dataclass(frozen=True)
class TrainView:
    """Training views of one epoch: a picklable function of (image, box, index)."""

    config: TransformConfig
    seed: int
    epoch: int

    def __call__(self, image: Tensor, box: Box | None, index: int) -> Tensor:
        """See `transforms.train_view`; refuses an image without a box where the configuration crops to it."""
        _require_box(self.config, box, index)
        return train_view(image, self.config, self.seed, self.epoch, index, box)


@dataclass(frozen=True)
class TestView:
    """Test views: a picklable function of (image, box, index)."""

    config: TransformConfig

    def __call__(self, image: Tensor, box: Box | None, index: int) -> Tensor:
        """See `transforms.test_view`; refuses an image without a box where the configuration crops to it."""
        _require_box(self.config, box, index)
        return test_view(image, self.config, box)


def _require_box(config: TransformConfig, box: Box | None, index: int) -> None:
    if config.crop_to_box and box is None:
        raise ConfigError(f"crop_to_box is set, but image {index} has no box; choose a dataset with boxes or leave crop_to_box out")


def iterate_batches(dataset: ImageSource, batches: Sequence[Indices], view: View, num_loader_workers: int) -> Iterator[Batch]:
    """Yield (images, indices) for each index array: images is float32 (n, 3, H, W), n = len(indices), which may be 0.

    Args:
        dataset: where images come from.
        batches: dataset indices of each batch, in order.
        view: `TrainView` or `TestView`; it must give one size for all images of a batch.
        num_loader_workers: processes that decode ahead; 0 works in this process.

    Raises:
        ConfigError: the views of a batch differ in size.
    """
    source = _Batches(dataset, batches, view)
    if num_loader_workers == 0:
        for number in range(len(batches)):
            yield source[number]
    else:
        # The sampler yields the number of a whole batch, so a loader worker returns it stacked and nothing is collated again.
        yield from DataLoader(source, batch_size=None, shuffle=False, num_workers=num_loader_workers, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Batches(Dataset[Batch]):
    def __init__(self, dataset: ImageSource, batches: Sequence[Indices], view: View) -> None:
        self.dataset = dataset
        self.batches = batches
        self.view = view

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        indices = self.batches[number]
        # An empty shard still has the shape of the others; image 0 shows it.
        first = self._view(int(indices[0]) if len(indices) else 0)
        # Written in place: a list of views, stacked, would hold the batch twice and leave the cache.
        images = first.new_empty((len(indices), *first.shape))
        for position, index in enumerate(indices):
            view = self._view(int(index)) if position else first
            if view.shape != first.shape:
                raise ConfigError(f"views of one batch are {tuple(first.shape)} and {tuple(view.shape)}; set crop_size or a fixed resize")
            images[position] = view
        return images, indices

    def _view(self, index: int) -> Tensor:
        return self.view(self.dataset.image(index), self.dataset.box(index), index)
