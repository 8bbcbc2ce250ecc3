"""Places of the encoded images in `images.arrow`, with which single images can be read without the rest of the file.

They are derived from a prepared folder and are no part of it: the folder's files are the dataset's identity.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dml_core.data.store.info import IMAGES_FILE
from dml_core.errors import DataError

RANGES_FILE = "ranges.npy"
_RANGE = np.dtype([("offset", "<i8"), ("length", "<i8"), ("hash", "<u8")])  # 24 bytes per image
Ranges = np.ndarray[Any, np.dtype[np.void]]


def image_ranges(folder: Path) -> Ranges:
    """Return `offset` and `length` in bytes of each of the N images in a prepared folder's `images.arrow`, and its `image_hash`: (N,).

    `open_ranges` reads the array from `ranges.npy`.
    """
    with pa.memory_map(str(folder / IMAGES_FILE)) as file:
        file_start = file.read_buffer().address
        reader = pa.ipc.open_file(file)
        parts = [_batch_ranges(reader.get_batch(number)["image"], file_start) for number in range(reader.num_record_batches)]
    return np.concatenate(parts) if parts else np.empty(0, _RANGE)


def _batch_ranges(images: Any, file_start: int) -> Ranges:
    """Return the ranges of one record batch, whose buffers lie in the mapped file."""
    _, ends, data = images.buffers()
    ends_M = np.frombuffer(ends, np.int32)[images.offset : images.offset + len(images) + 1].astype(np.int64)
    ranges_N = np.empty(len(images), _RANGE)
    ranges_N["offset"] = data.address - file_start + ends_M[:-1]
    ranges_N["length"] = np.diff(ends_M)
    ranges_N["hash"] = [image_hash(image.as_buffer()) for image in images]
    return ranges_N


def image_hash(data: Any) -> int:
    """Return a 64-bit hash of an image's encoded bytes, which detects damage."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def open_ranges(folder: Path) -> Ranges:
    """Return the ranges in `folder`, memory-mapped: the processes of a machine share them.

    Raises:
        DataError: the file is missing, damaged or of another format.
    """
    path = folder / RANGES_FILE
    try:
        ranges_N: Ranges = np.load(path, "r", allow_pickle=False)
        if ranges_N.dtype != _RANGE:
            raise ValueError
    except (OSError, ValueError, EOFError):
        raise DataError(f"{path}: missing, damaged or of another version; rerun the command") from None
    return ranges_N
