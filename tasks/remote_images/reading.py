"""Images of a packed dataset in a bucket: read by byte range, some batches ahead, and cached on this machine's disk.

The images come from one version of the object, whose SHA-256 is the dataset's; each image is compared with its hash in `ranges.npy`, also
when it comes from the cache. So no other bytes than the packed ones are ever decoded.
"""

import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dml_core.data.store.info import IMAGES_FILE, read_info
from dml_core.data.store.ranges import RANGES_FILE, image_hash, image_ranges, open_ranges
from dml_core.errors import StoreError
from tasks.remote_images.cache import ImageCache
from tasks.storage import READS_AT_ONCE, DamagedObjectError, Store

CACHE_FOLDER = "images"  # in the store's cache
GAP_BYTES = 32 << 10  # images this close to each other are read by one request: the bytes between them cost less than another one
REQUEST_BYTES = 4 << 20  # limit on the images of one request
GB = 10**9


def push_ranges(store: Store, packed: Path, key: str) -> None:
    """Push the places of a packed dataset's images to where the dataset is, unless they are there.

    Raises:
        StoreError: the bucket cannot be read or written.
    """
    if store.is_remote and RANGES_FILE not in store.list_objects(key):
        with tempfile.TemporaryDirectory() as folder:
            np.save(Path(folder, RANGES_FILE), image_ranges(packed))
            store.push(key, Path(folder))


class RemoteImages:
    """Images of a packed dataset in a bucket; an `EncodedImages` of `dml_core`. The folder has all files but `images.arrow`.

    It pickles as its arguments. Each process, also a forked one, opens its own connections and files at first use.

    Args:
        cache_gb: bound on the images in the cache, those of other datasets included.
        version: ETag of the dataset's `images.arrow`; by default that of the present object.

    Raises:
        StoreError: the object is missing, or not the dataset's.
    """

    def __init__(self, address: str, cache: Path, key: str, cache_gb: float, version: str | None = None) -> None:
        store = Store(address, cache)
        self._arguments = (address, cache, key, cache_gb, version or _version(store, key))
        self._here: _Reader | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteImages, self._arguments

    def read(self, position: int) -> bytes:
        """Return an encoded image: one that is being fetched, cached, or fetched now.

        Raises:
            StoreError: the bucket cannot be read, or the object was replaced or damaged.
        """
        return self._reader().read(position)

    def expect(self, positions: Iterable[int]) -> None:
        """Start to fetch those of the images that are not cached, the first ones first, and forget all others.

        Without images its threads end as soon as their current requests do.
        """
        wanted = list(positions)
        if wanted or self._here is not None:
            self._reader().expect(wanted)

    def _reader(self) -> "_Reader":
        if self._here is None or self._here.process != os.getpid():
            self._here = _Reader(*self._arguments)
        return self._here


def _version(store: Store, key: str) -> str:
    """Return the ETag of a dataset's `images.arrow`, after comparing its SHA-256 with the dataset's."""
    name = f"{key}/{IMAGES_FILE}"
    etag, sha256 = store.version(name)
    if sha256 != read_info(store.folder(key)).images_sha256:
        raise StoreError(f"store {store.address}: {name} is not the dataset's (SHA-256 differs); rerun the command, which pushes it again")
    return etag


class _Reader:
    """The connections, files and threads of one process."""

    def __init__(self, address: str, cache: Path, key: str, cache_gb: float, version: str) -> None:
        self.process = os.getpid()
        self._store, self._object, self._version = Store(address, cache), f"{key}/{IMAGES_FILE}", version
        ranges_N = open_ranges(self._store.folder(key))
        self._offsets, self._lengths, self._hashes = (ranges_N[name] for name in ("offset", "length", "hash"))
        name = key.rpartition("/")[2]
        self._cache = ImageCache(cache / CACHE_FOLDER, name, len(ranges_N), int(self._lengths.sum()), int(cache_gb * GB))
        self._pool: ThreadPoolExecutor | None = None
        self._fetching: dict[int, Future[dict[int, bytes]]] = {}  # position -> the request that brings it, and other images

    def read(self, position: int) -> bytes:
        if (request := self._fetching.get(position)) is not None:
            return request.result()[position]
        data = self._cache.read(position, int(self._lengths[position]))
        if data is not None:
            if self._is_intact(position, data):
                return data
            self._cache.forget(position)
        return self._fetch([position])[position]

    def expect(self, positions: list[int]) -> None:
        wanted = dict.fromkeys(positions)
        dropped = {self._fetching.pop(position) for position in [*self._fetching] if position not in wanted}
        for request in dropped.difference(self._fetching.values()):
            request.cancel()
        missing = [position for position in wanted if position not in self._fetching and position not in self._cache]
        if missing and self._pool is None:
            self._pool = ThreadPoolExecutor(READS_AT_ONCE, "images of a bucket")
        for together in self._requests(missing):
            assert self._pool is not None
            self._fetching |= dict.fromkeys(together, self._pool.submit(self._fetch, together))
        if self._pool is not None and not wanted:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _requests(self, positions: list[int]) -> list[list[int]]:
        """Return the positions, joined where images are close in the file, in the order of each group's first expected image."""
        order = {position: number for number, position in enumerate(positions)}
        groups: list[list[int]] = []
        for position in sorted(positions):
            begin, end = self._span([position])
            start, stop = self._span(groups[-1]) if groups else (begin, begin)
            if groups and begin - stop <= GAP_BYTES and end - start <= REQUEST_BYTES:
                groups[-1].append(position)
            else:
                groups.append([position])
        return sorted(groups, key=lambda group: min(order[position] for position in group))

    def _span(self, group: list[int]) -> tuple[int, int]:
        """Return the byte range of images in the order of the file."""
        return int(self._offsets[group[0]]), int(self._offsets[group[-1]] + self._lengths[group[-1]])

    def _fetch(self, group: list[int]) -> dict[int, bytes]:
        """Return the images of one request, sent again if they arrive damaged, and cache them. Runs in threads."""
        try:
            images = self._request(group)
        except DamagedObjectError:
            images = self._request(group)
        self._cache.add(images)
        return images

    def _request(self, group: list[int]) -> dict[int, bytes]:
        start, stop = self._span(group)
        data = self._store.read_range(self._object, start, stop, self._version)
        images = {}
        for position in group:
            begin, end = self._span([position])
            images[position] = data[begin - start : end - start]
            if not self._is_intact(position, images[position]):
                raise DamagedObjectError(
                    f"store {self._store.address}: image {position} of {self._object} is damaged; "
                    "remove the object and rerun the command, which pushes it again"
                )
        return images

    def _is_intact(self, position: int, data: bytes) -> bool:
        return image_hash(data) == int(self._hashes[position])
