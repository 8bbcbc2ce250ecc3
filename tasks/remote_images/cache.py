"""Images of a bucket's datasets on this machine's disk, for all its processes, within a bound that holds at every moment.

A dataset has a folder with two files. `images` grows by appending images; `index` has, for each position in the dataset, the image's place
in `images` plus 1, or 0. One lock per machine covers every change of a size. An image is written before its entry, so a process killed
in between leaves bytes that count but are not found; the reader compares hashes, which covers a lost machine, too.

Nothing is replaced while a process uses its dataset. In training each image is drawn about once per epoch, and a cache that replaces the
oldest images drops most of them just before they are drawn again.
"""

import fcntl
import logging
import os
import shutil
import weakref
from pathlib import Path

from dml_core.errors import StoreError
from dml_core.files import write_errors
from tasks.locks import alone

IMAGES, INDEX, LOCK = "images", "index", ".lock"
ENTRY_BYTES = 8
logger = logging.getLogger(__name__)


class ImageCache:
    """The cached images of one dataset. Its object belongs to one process; threads may share it.

    Args:
        root, name: folder of all datasets' caches on this machine, and the dataset's in it.
        num_bytes: bytes of all the dataset's images, the most that it needs.
        max_bytes: bound on the files of all datasets in `root`. Other datasets that no process uses make room, least recently used first.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, root: Path, name: str, num_images: int, num_bytes: int, max_bytes: int) -> None:
        self._root, self._folder, self._max_bytes = root, root / name, max_bytes
        self._index: int | None = None  # file descriptor; None if not even the index fits
        self._is_full = False
        index_bytes = ENTRY_BYTES * num_images
        with write_errors(f"{self._folder}:", "free space, or change DML_STATE"), alone(root / LOCK):
            self._make_room(index_bytes + num_bytes)
            if self._used() - _size(self._folder / INDEX) + index_bytes <= max_bytes:
                self._open(index_bytes)

    def __contains__(self, position: int) -> bool:
        return self._place(position) > 0

    def read(self, position: int, length: int) -> bytes | None:
        """Return the bytes stored for an image, which may be damaged, or None."""
        place = self._place(position)
        return os.pread(self._images, length, place - 1) if place else None

    def forget(self, position: int) -> None:
        """Remove an image whose bytes are damaged; their room is not used again."""
        if self._index is not None:
            os.pwrite(self._index, bytes(ENTRY_BYTES), ENTRY_BYTES * position)

    def add(self, images: dict[int, bytes]) -> None:
        """Store images by position until the bound is reached; a disk that is full before counts as reached."""
        if self._index is None or self._is_full:
            return
        try:
            with alone(self._root / LOCK):
                room, end = self._max_bytes - self._used(), os.fstat(self._images).st_size
                for position, data in images.items():
                    if position in self:
                        continue  # another process was first
                    if len(data) > room:
                        self._is_full = True
                        break
                    if os.pwrite(self._images, data, end) < len(data):
                        raise OSError("disk full")
                    os.pwrite(self._index, (end + 1).to_bytes(ENTRY_BYTES, "little"), ENTRY_BYTES * position)
                    end, room = end + len(data), room - len(data)
        except (OSError, StoreError) as error:
            self._is_full = True
            logger.warning("%s: further images are not cached (%s)", self._folder, getattr(error, "strerror", None) or error)

    def _place(self, position: int) -> int:
        """Return an image's place in `images` plus 1; 0 if it is not there, or its entry is damaged."""
        if self._index is None:
            return 0
        place = int.from_bytes(os.pread(self._index, ENTRY_BYTES, ENTRY_BYTES * position), "little")
        return place if place <= os.fstat(self._images).st_size else 0

    def _open(self, index_bytes: int) -> None:
        """Open the files, and mark the dataset as used as long as this object lives."""
        self._folder.mkdir(exist_ok=True)
        os.utime(self._folder)  # the time of its last use
        self._images = os.open(self._folder / IMAGES, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(self._images, fcntl.LOCK_SH)
        self._index = os.open(self._folder / INDEX, os.O_RDWR | os.O_CREAT, 0o666)
        os.ftruncate(self._index, index_bytes)  # zeros
        for descriptor in (self._images, self._index):
            weakref.finalize(self, os.close, descriptor)

    def _make_room(self, wanted: int) -> None:
        """Remove unused datasets until this one fits, or none is left; this one too if the bound was lowered."""
        folders = sorted((path for path in self._root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
        for folder in [path for path in folders if path != self._folder]:
            if self._used() - _folder_bytes(self._folder) + wanted <= self._max_bytes:
                return
            _remove_unused(folder)
        if self._used() > self._max_bytes:
            _remove_unused(self._folder)

    def _used(self) -> int:
        return sum(_folder_bytes(path) for path in self._root.iterdir() if path.is_dir())


def _remove_unused(folder: Path) -> None:
    """Remove a dataset's folder unless a process uses it."""
    if not folder.is_dir():
        return
    images = os.open(folder / IMAGES, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(images, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError:
        pass
    finally:
        os.close(images)


def _folder_bytes(folder: Path) -> int:
    return _size(folder / IMAGES) + _size(folder / INDEX)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
