"""IDX, the format of MNIST and its successors: a magic number, the sizes, and bytes in row-major order, optionally gzipped.

Format: two zero bytes, a type byte (8: unsigned bytes), the number of dimensions, then one big-endian 32-bit size per dimension.
"""

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from dml_core.errors import DataError

_UNSIGNED_BYTES = 8


def find_idx(folder: Path, stem: str) -> Path | None:
    """Return `stem` or `stem.gz` in `folder`, or None."""
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def idx_bytes(path: Path) -> bytes:
    """Return the bytes of one IDX file, decompressed if gzipped.

    Raises:
        DataError: the file is unreadable or damaged.
    """
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions and disk") from None
        raise DataError(f"{path}: damaged or truncated; fetch the file again") from None


def read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the array of one IDX file of unsigned bytes.

    Raises:
        DataError: the file is damaged, not IDX of unsigned bytes, or its length does not match its sizes.
    """
    data = idx_bytes(path)
    header_end = 4 + 4 * data[3] if len(data) > 4 else 0
    if not 4 < header_end <= len(data) or data[:3] != bytes([0, 0, _UNSIGNED_BYTES]):
        raise DataError(f"{path}: not an IDX file of unsigned bytes; fetch the file again")
    shape = tuple(int(size) for size in np.frombuffer(data[4:header_end], dtype=">u4"))
    if len(data) != header_end + int(np.prod(shape)):
        raise DataError(f"{path}: has {len(data) - header_end} bytes where {shape} are announced; fetch the file again")
    return np.frombuffer(data, dtype=np.uint8, offset=header_end).reshape(shape)
