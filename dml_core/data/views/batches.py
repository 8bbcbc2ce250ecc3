"""Batches of views on a device, loaded through torch's DataLoader; they do not depend on the process that makes them.

Pixels are transferred as uint8, a quarter of the bytes, and scaled on the network's device. Copies to a GPU use pinned memory and a
separate stream, one batch ahead of training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dml_core.data.store.packed import Indices, PackedDataset
from dml_core.data.store.rows import Box
from dml_core.data.views.device_decoding import EncodedBatch, decode_batch, read_encoded
from dml_core.data.views.transform_config import Scaling, TransformConfig
from dml_core.data.views.transforms import scale, test_pixels, train_pixels
from dml_core.errors import ConfigError, DmlError

CPU = torch.device("cpu")
_AHEAD_IMAGES = 256  # images of following batches that a dataset may fetch while one is made
_PART_PIXELS = 2**17  # values: one photograph at network size, or a batch of small images
Batch = tuple[Tensor, Indices]
Loaded = tuple[Tensor | EncodedBatch, Indices]


@dataclass(frozen=True)
class TrainView:
    """Training views of one epoch."""

    config: TransformConfig
    seed: int
    epoch: int

    def __call__(self, image: Tensor, box: Box | None, index: int, copy: int = 0) -> Tensor:
        """Return `transforms.train_pixels`; reject an image without a box if the configuration crops to it."""
        _require_box(self.config, box, index)
        return train_pixels(image, self.config, self.seed, self.epoch, index, box, copy)


@dataclass(frozen=True)
class TestView:
    """Test views, the same for every copy."""

    config: TransformConfig

    def __call__(self, image: Tensor, box: Box | None, index: int, copy: int = 0) -> Tensor:
        """Return `transforms.test_pixels`; reject an image without a box if the configuration crops to it."""
        _require_box(self.config, box, index)
        return test_pixels(image, self.config, box)


View = TrainView | TestView


def _require_box(config: TransformConfig, box: Box | None, index: int) -> None:
    if config.crop_to_box and box is None:
        remedy = "choose a dataset with boxes, packed without stored_size, or leave crop_to_box out"
        raise ConfigError(f"crop_to_box is set, but image {index} has no box; {remedy}")


def count_copies(batches: Sequence[Indices]) -> list[Indices]:
    """Count the earlier occurrences of every index in an epoch's batches, so that each occurrence has its own view."""
    order = np.concatenate(batches)
    by_index = np.argsort(order, kind="stable")  # groups each image's positions, in epoch order
    is_first = np.diff(order[by_index], prepend=-1) != 0
    places = np.arange(len(order))
    copies = np.empty_like(order)
    copies[by_index] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return np.split(copies, np.cumsum([len(batch) for batch in batches])[:-1])


class Loader:
    """Batches of one dataset on one device. Its processes start at the first batch and end at `close` or with garbage collection.

    Processes that persist between epochs keep their decoded images (`PackedDataset`).

    Args:
        dataset: source of the images.
        num_loader_workers: processes that decode ahead; 0 decodes in this process.
        device: device of the batches.
    """

    def __init__(self, dataset: PackedDataset, num_loader_workers: int = 0, device: torch.device = CPU) -> None:
        self.device = device
        self._dataset = dataset
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._tasks: list[_Task] = []
        self._num_processes = max(1, num_loader_workers)
        # The sampler yields tasks of whole batches, so loader processes return stacked batches that need no collation.
        self._loader: DataLoader[Any] | None = DataLoader(
            _Batches(dataset),
            batch_size=None,
            sampler=self._tasks,
            num_workers=num_loader_workers,
            persistent_workers=num_loader_workers > 0,
            pin_memory=device.type == "cuda",
            collate_fn=_unchanged,
            generator=torch.Generator(),  # otherwise it draws from torch's global stream, which dropout uses
        )

    def batches(self, batches: Sequence[Indices], view: View, copies: Sequence[Indices] | None = None) -> Iterator[Batch]:
        """Yield (images, indices) for each index array: images is float32 (n, 3, H, W), n = len(indices), which may be 0.

        A second call ends the iteration of the first.

        Args:
            batches: dataset indices of each batch, in order.
            view: `TrainView` or `TestView`; all views of a batch must have one size.
            copies: earlier occurrences of each index (`count_copies`); None if no image repeats.

        Raises:
            ConfigError: the views of a batch differ in size.
        """
        assert self._loader is not None, "closed"
        copies = [np.zeros_like(batch) for batch in batches] if copies is None else copies
        self._tasks[:] = [
            (view, indices, again, _following(batches, number, self._num_processes))
            for number, (indices, again) in enumerate(zip(batches, copies, strict=True))
        ]
        loaded, move = map(_or_raise, self._loader), partial(self._on_device, view)
        scaling = view.config.scaling
        try:
            if self._stream is None:
                yield from ((_scaled_in_parts(images, scaling), indices) for images, indices in map(move, loaded))
            else:
                yield from ((scale(images, scaling), indices) for images, indices in _one_ahead(loaded, move, self._stream))
        finally:
            self._dataset.expect(np.empty(0, np.int64))

    def close(self) -> None:
        """Stop the processes, and what the dataset fetches ahead."""
        if self._loader is not None and isinstance(self._loader._iterator, _MultiProcessingDataLoaderIter):
            self._loader._iterator._shutdown_workers()  # a garbage collection, at any later time, would wait 5 s for each of them
        self._loader = None
        self._dataset.expect(np.empty(0, np.int64))

    def _on_device(self, view: View, loaded: Loaded) -> Batch:
        """Return a batch's pixels on the device; JPEGs that were only read are decoded there."""
        images, indices = loaded
        if isinstance(images, Tensor):
            return images.to(self.device, non_blocking=True), indices
        decoded = decode_batch(images, self._dataset, self.device)
        return _stacked(map(view, decoded, images.boxes, images.indices, images.copies), len(indices)), indices


def _following(batches: Sequence[Indices], number: int, num_processes: int) -> tuple[Indices, ...]:
    """Return the batches that a process makes after batch `number`, as processes take turns: the next one, and more up to a limit."""
    following: list[Indices] = []
    num_images = 0
    for later in range(number + num_processes, len(batches), num_processes):
        num_images += len(batches[later])
        if following and num_images > _AHEAD_IMAGES:
            break
        following.append(batches[later])
    return tuple(following)


def _unchanged(batch: Any) -> Any:
    return batch


def _or_raise(loaded: Loaded | DmlError) -> Loaded:
    """Return a loaded batch; raise the error that a loader process returned in its place."""
    if isinstance(loaded, DmlError):
        raise loaded
    return loaded


def _scaled_in_parts(pixels: Tensor, scaling: Scaling) -> Tensor:
    """Like `scale`, in parts that stay in a CPU's cache between the product and the sum."""
    scaled = torch.empty(pixels.shape, dtype=torch.float32)
    size = max(1, _PART_PIXELS // max(1, pixels[:1].numel()))
    for part, place in zip(torch.split(pixels, size), torch.split(scaled, size), strict=True):
        scale(part, scaling, place)
    return scaled


def _one_ahead(loaded: Iterator[Loaded], move: Callable[[Loaded], Batch], stream: torch.cuda.Stream) -> Iterator[Batch]:
    """Yield batches on a GPU; each batch's copy or decoding starts, on a separate stream, before the previous batch is yielded.

    A loader keeps its stream, because torch keeps the memory of each stream apart.
    """
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for batch in loaded:
        with torch.cuda.stream(stream):
            following = move(batch), stream.record_event()
        if ahead is not None:
            yield _arrived(*ahead)
        ahead = following
    if ahead is not None:
        yield _arrived(*ahead)


def _arrived(batch: Batch, copied: torch.cuda.Event) -> Batch:
    """Return the batch; GPU work queued from now on waits for its copy, this process does not."""
    stream = torch.cuda.current_stream(batch[0].device)
    stream.wait_event(copied)
    batch[0].record_stream(stream)
    return batch


_Task = tuple[View, Indices, Indices, tuple[Indices, ...]]


class _Batches(Dataset[Any]):
    """Map tasks to batches of uint8 pixels, or of encoded images to be decoded on the device.

    User errors are returned, not raised, as a DataLoader would add lines to their message.
    """

    def __init__(self, dataset: PackedDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, task: _Task) -> Loaded | DmlError:
        view, indices, copies, following = task
        try:
            self.dataset.expect(np.concatenate([indices, *following]))
            return self._batch(view, indices, copies)
        except DmlError as error:
            return error

    def _batch(self, view: View, indices: Indices, copies: Indices) -> Loaded:
        # An empty shard needs the shape of the others, which image 0 gives.
        shown, again = (indices.tolist(), copies.tolist()) if len(indices) else ([0], [0])
        if view.config.decoder == "nvjpeg":
            return read_encoded(self.dataset, shown, again), indices
        dataset = self.dataset
        views = (view(dataset.image(index), dataset.box(index), index, copy) for index, copy in zip(shown, again, strict=True))
        return _stacked(views, len(indices)), indices


def _stacked(views: Iterator[Tensor], num_images: int) -> Tensor:
    """Return views as one tensor (num_images, 3, H, W); if there are none, a first one gives their shape."""
    first = next(views)
    # Stacked in parts that stay in a CPU's cache: a list of all views would hold the batch twice.
    images = first.new_empty((num_images, *first.shape))
    rest = chain((first,), views)
    for places in torch.split(images, max(1, _PART_PIXELS // max(1, first.numel()))):
        part = [*islice(rest, len(places))]
        for pixels in part:
            if pixels.shape != first.shape:
                raise ConfigError(
                    f"views of one batch are {tuple(first.shape)} and {tuple(pixels.shape)}; set crop and crop_size, or a fixed resize"
                )
        if part:
            torch.stack(part, out=places)
    return images
