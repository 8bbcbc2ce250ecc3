"""Index arrays to stacked tensors on a device, through torch's DataLoader; the tensors are the same in whatever process they are made.

Pixels travel as uint8, a quarter of the bytes, and are scaled where the network is. To a GPU they go from pinned memory on a stream of
their own, one batch ahead of the one that is trained on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dml_core.data.store.rows import Box
from dml_core.data.views.transform_config import Scaling, TransformConfig
from dml_core.data.views.transforms import scale, test_pixels, train_pixels
from dml_core.errors import ConfigError, DmlError

CPU = torch.device("cpu")
Indices = np.ndarray[Any, np.dtype[np.int64]]
Batch = tuple[Tensor, Indices]


class ImageSource(Protocol):
    """What a batch needs of a dataset; `PackedDataset` is one."""

    def image(self, index: int) -> Tensor:
        """uint8 (3, H, W)."""

    def box(self, index: int) -> Box | None:
        """(left, top, right, bottom) or None."""


class View(Protocol):
    """A picklable function of (image, box, index, copy) that gives the uint8 pixels of a view."""

    @property
    def config(self) -> TransformConfig:
        """How they are cut and scaled."""

    def __call__(self, image: Tensor, box: Box | None, index: int, copy: int = 0) -> Tensor:
        """uint8 (3, H, W), RGB."""


@dataclass(frozen=True)
class TrainView:
    """Training views of one epoch."""

    config: TransformConfig
    seed: int
    epoch: int

    def __call__(self, image: Tensor, box: Box | None, index: int, copy: int = 0) -> Tensor:
        """See `transforms.train_pixels`; refuses an image without a box where the configuration crops to it."""
        _require_box(self.config, box, index)
        return train_pixels(image, self.config, self.seed, self.epoch, index, box, copy)


@dataclass(frozen=True)
class TestView:
    """Test views, the same for every copy."""

    config: TransformConfig

    def __call__(self, image: Tensor, box: Box | None, index: int, copy: int = 0) -> Tensor:
        """See `transforms.test_pixels`; refuses an image without a box where the configuration crops to it."""
        _require_box(self.config, box, index)
        return test_pixels(image, self.config, box)


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


class Loader:
    """Batches of one dataset on one device. Its processes start at the first batch and live until `close`, or until nothing refers to it.

    Processes that live from epoch to epoch keep what they have decoded (`PackedDataset`).

    Args:
        dataset: where images come from.
        num_loader_workers: processes that decode ahead; 0 works in this process.
        device: where batches go.
    """

    def __init__(self, dataset: ImageSource, num_loader_workers: int = 0, device: torch.device = CPU) -> None:
        self.device = device
        self._tasks: list[_Task] = []
        # The sampler yields whole batches' tasks, so a loader process returns a batch stacked and nothing is collated again.
        self._loader: DataLoader[Any] | None = DataLoader(
            _Batches(dataset),
            batch_size=None,
            sampler=self._tasks,
            num_workers=num_loader_workers,
            persistent_workers=num_loader_workers > 0,
            pin_memory=device.type == "cuda",
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # or it would draw from torch's own stream, which dropout draws from
        )

    def batches(self, batches: Sequence[Indices], view: View, copies: Sequence[Indices] | None = None) -> Iterator[Batch]:
        """Yield (images, indices) for each index array: images is float32 (n, 3, H, W), n = len(indices), which may be 0.

        A second call ends what is left of the first.

        Args:
            batches: dataset indices of each batch, in order.
            view: `TrainView` or `TestView`; it must give one size for all images of a batch.
            copies: of each index, how often it came before (`count_copies`); None where no image comes twice.

        Raises:
            ConfigError: the views of a batch differ in size.
        """
        assert self._loader is not None, "closed"
        copies = [np.zeros_like(batch) for batch in batches] if copies is None else copies
        self._tasks[:] = [(view, indices, again) for indices, again in zip(batches, copies, strict=True)]
        pixels = map(_whole, self._loader)
        scaling = view.config.scaling
        if self.device.type == "cpu":
            yield from ((_scaled_one_by_one(images, scaling), indices) for images, indices in pixels)
        else:
            yield from ((scale(images, scaling), indices) for images, indices in _one_ahead(pixels, self.device))

    def close(self) -> None:
        """End the processes."""
        self._loader = None


def iterate_batches(
    dataset: ImageSource, batches: Sequence[Indices], view: View, num_loader_workers: int, copies: Sequence[Indices] | None = None
) -> Iterator[Batch]:
    """As `Loader.batches`, on the CPU, with processes for these batches alone."""
    yield from Loader(dataset, num_loader_workers).batches(batches, view, copies)


def _as_it_is(batch: Any) -> Any:
    return batch


def _whole(loaded: Batch | DmlError) -> Batch:
    if isinstance(loaded, DmlError):
        raise loaded
    return loaded


def _scaled_one_by_one(pixels: Tensor, scaling: Scaling) -> Tensor:
    """As `scale`, but between its product and its sum an image stays in a CPU's cache."""
    scaled = torch.empty(pixels.shape, dtype=torch.float32)
    for image, place in zip(pixels, scaled, strict=True):
        scale(image, scaling, place)
    return scaled


def _one_ahead(pixels: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Each batch on a GPU, its copy begun, on a stream of copies alone, before the batch in front of it is handed out."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for images, indices in pixels:
        with torch.cuda.stream(stream):
            following = (images.to(device, non_blocking=True), indices), stream.record_event()
        if ahead is not None:
            yield _arrived(*ahead)
        ahead = following
    if ahead is not None:
        yield _arrived(*ahead)


def _arrived(batch: Batch, copied: torch.cuda.Event) -> Batch:
    """The batch, for the work that is begun from now on; this process waits for nothing."""
    stream = torch.cuda.current_stream(batch[0].device)
    stream.wait_event(copied)
    batch[0].record_stream(stream)
    return batch


_Task = tuple[View, Indices, Indices]


class _Batches(Dataset[Any]):
    """Tasks to batches of uint8 pixels; what the user did wrong comes as a value, as a DataLoader would wrap it in lines of its own."""

    def __init__(self, dataset: ImageSource) -> None:
        self.dataset = dataset

    def __getitem__(self, task: _Task) -> Batch | DmlError:
        try:
            return self._batch(*task)
        except DmlError as error:
            return error

    def _batch(self, view: View, indices: Indices, copies: Indices) -> Batch:
        # An empty shard still has the shape of the others; image 0 shows it.
        first = self._view(view, int(indices[0]), int(copies[0])) if len(indices) else self._view(view, 0, 0)
        # Written in place: a list of views, stacked, would hold the batch twice and leave the cache.
        images = first.new_empty((len(indices), *first.shape))
        for position, (index, copy) in enumerate(zip(indices, copies, strict=True)):
            pixels = self._view(view, int(index), int(copy)) if position else first
            if pixels.shape != first.shape:
                raise ConfigError(f"views of one batch are {tuple(first.shape)} and {tuple(pixels.shape)}; set crop_size or a fixed resize")
            images[position] = pixels
        return images, indices

    def _view(self, view: View, index: int, copy: int) -> Tensor:
        return view(self.dataset.image(index), self.dataset.box(index), index, copy)
