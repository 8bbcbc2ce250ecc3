"""One role of a packed dataset, as images, labels and boxes.

The Arrow file is memory-mapped: all workers of a machine share one copy in the page cache, and opening it reads nothing. A dataset whose
file is elsewhere reads its images through `EncodedImages`.
"""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dml_core.data.store.decode import decode_rgb, decode_upright, for_nvjpeg
from dml_core.data.store.info import IMAGES_FILE, MANIFEST_FILE, read_info
from dml_core.data.store.rows import Box
from dml_core.errors import ConfigError, DataError

_COMPARED_ROLES = ("query", "gallery")
_KEPT_BYTES = 64 * 2**20
Indices = np.ndarray[Any, np.dtype[np.int64]]


class EncodedImages(Protocol):
    """Source of a packed dataset's images that are not in its folder. An image's position is its row in `images.arrow`.

    It pickles, and works in forked processes.
    """

    def read(self, position: int) -> bytes:
        """Return an encoded image.

        Raises:
            DmlError: it cannot be read, or its bytes are not the original ones.
        """

    def expect(self, positions: Iterable[int]) -> None:
        """Start to fetch the images that are read next, the first ones first, and forget all others."""


class PackedDataset:
    """The images of one role, in packing order.

    It opens its files at first use and pickles as its arguments, so it can be sent to a worker process or inherited by a forked one.
    Up to 64 MiB of decoded pixels are cached, so a dataset of small images is decoded only once for all epochs; gray images are cached
    as one channel.

    Args:
        folder: folder written by `prepare`.
        role: "train", "test", "query" or "gallery".
        classes: names of the role's classes to keep (for a validation split); None keeps all.
        source: source of the images; None for `images.arrow` in `folder`.

    Raises:
        DataError: no prepared dataset in `folder`.
        ConfigError: the dataset has no such role, or the role no such class.
    """

    def __init__(self, folder: Path, role: str, classes: tuple[str, ...] | None = None, source: EncodedImages | None = None) -> None:
        info = read_info(folder)
        if role not in info.roles:
            raise ConfigError(f"{folder}: no role '{role}' (it has {', '.join(info.roles)})")
        self._decode = decode_upright if info.is_own else decode_rgb
        self.folder = folder
        self.role = role
        self.classes = classes
        self.source = source
        self._decoded: dict[int, Tensor] = {}
        self._num_decoded_bytes = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        arguments = {"folder": self.folder, "role": self.role, "classes": self.classes, "source": self.source}
        return {**arguments, "_decode": self._decode, "_decoded": {}, "_num_decoded_bytes": 0}

    @cached_property
    def labels(self) -> Indices:
        """Class indices (N,), 0 to C - 1, in the order of the dataset's numbers. Query and gallery share them, so they compare."""
        return np.asarray(np.searchsorted(self._classes[0], self._rows["label"].to_numpy()), np.int64)

    @cached_property
    def class_names(self) -> list[str]:
        """Class names by class index; for query and gallery the classes of both."""
        return self._classes[1]

    @cached_property
    def paths(self) -> list[str]:
        """Names of the N images in the raw dataset."""
        rows = self._read(("role", "label_name", "path"))
        return [str(path) for path in rows.filter(pc.equal(rows["role"], self.role))["path"].to_pylist()]

    def raw_bytes(self, index: int) -> bytes:
        """Return the encoded image as in the raw dataset."""
        position = int(self._positions[index])
        return self._images[position].as_py() if self.source is None else self.source.read(position)

    def expect(self, indices: Indices) -> None:
        """Let a source elsewhere fetch the images that are needed next, the first ones first, and forget all others."""
        if self.source is not None:
            self.source.expect(int(self._positions[index]) for index in indices.tolist() if index not in self._decoded)

    def image(self, index: int) -> Tensor:
        """Return the image, uint8 (3, height, width), RGB, read-only. The user's own images are upright by their EXIF orientation.

        Raises:
            DataError: the bytes do not decode, so the store was damaged after it was written.
        """
        index = int(index)
        if (cached := self._decoded.get(index)) is not None:
            return cached
        try:
            pixels = self._decode(self.raw_bytes(index))
        except ValueError as error:
            raise DataError(f"{self.folder}: image {index} of {self.role} is {error}; run `dml data prepare` again") from None
        if self._num_decoded_bytes + pixels.nbytes <= _KEPT_BYTES:
            pixels = _without_equal_channels(pixels)
            self._decoded[index] = pixels
            self._num_decoded_bytes += pixels.untyped_storage().nbytes()
        return pixels

    def encoded(self, index: int) -> tuple[Tensor, int]:
        """Return a JPEG's bytes, uint8 (num_bytes,), and EXIF orientation, to be decoded on a device; or `image(index)` and 1.

        Pixels are returned for images that nvJPEG does not decode.
        """
        return for_nvjpeg(self.raw_bytes(index), self._decode is decode_upright) or (self.image(index), 1)

    def box(self, index: int) -> Box | None:
        """Return the box (left, top, right, bottom) in pixels, or None if the dataset has no boxes."""
        box = self._boxes[int(index)].as_py()
        return None if box is None else (box[0], box[1], box[2], box[3])

    @cached_property
    def _comparable_rows(self) -> Any:
        """Manifest rows of this role and of the one that it is compared with, without image names, which are most of the data."""
        return self._read(("index", "role", "label", "label_name", "box"))

    def _read(self, columns: tuple[str, ...]) -> Any:
        table = pq.read_table(self.folder / MANIFEST_FILE, columns=list(columns), memory_map=True)
        roles = _COMPARED_ROLES if self.role in _COMPARED_ROLES else (self.role,)
        rows = table.filter(pc.is_in(table["role"], pa.array(roles)))
        if self.classes is None:
            return rows
        unknown = set(self.classes).difference(rows["label_name"].to_pylist())
        if unknown:
            raise ConfigError(f"{self.folder}: {self.role} has no class '{min(unknown)}'")
        return rows.filter(pc.is_in(rows["label_name"], pa.array(self.classes)))

    @cached_property
    def _rows(self) -> Any:
        return self._comparable_rows.filter(pc.equal(self._comparable_rows["role"], self.role))

    @cached_property
    def _classes(self) -> tuple[Indices, list[str]]:
        """The dataset's own class numbers, ascending, and the class names."""
        numbers, first = np.unique(self._comparable_rows["label"].to_numpy(), return_index=True)
        return numbers, [str(name) for name in self._comparable_rows["label_name"].take(first).to_pylist()]

    @cached_property
    def _positions(self) -> Indices:
        return np.asarray(self._rows["index"].to_numpy(), np.int64)

    @cached_property
    def _boxes(self) -> Any:
        return self._rows["box"]  # a million tuples would take 180 MB in each process

    @cached_property
    def _images(self) -> Any:
        return pa.ipc.open_file(pa.memory_map(str(self.folder / IMAGES_FILE))).read_all()["image"]


def _without_equal_channels(pixels: Tensor) -> Tensor:
    """Return the same pixels (3, H, W) in a third of the memory if the image is gray: a view of one channel."""
    is_gray = torch.equal(pixels[0], pixels[1]) and torch.equal(pixels[0], pixels[2])
    return pixels[:1].clone().expand(pixels.shape) if is_gray else pixels
