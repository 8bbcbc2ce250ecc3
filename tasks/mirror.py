"""Copies of a bucket's objects: the raw files of a dataset with a `mirror`, and backups."""

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from dml_core.data.readers.shared.archives import Progress
from dml_core.errors import StoreError, printable
from tasks.storage import Store
from tasks.wording import counted

FETCHED_AT_ONCE = 8
MAX_NAMED = 5  # objects in a warning
logger = logging.getLogger(__name__)


def copy_objects(address: str, folder: Path, progress: Progress | None = None, copied: dict[str, str] | None = None) -> None:
    """Copy the objects below `s3://bucket/prefix` that `folder` lacks; other files stay, and an interrupted copy resumes.

    Object names below the prefix become paths in the folder. Objects of which there are new versions are copied again. Warnings name them,
    the files that are deleted here, which stay so, and those that are deleted there, which stay too.

    Args:
        address, folder: from where, and to where.
        progress: called with (bytes done, total bytes) of each object.
        copied: name -> ETag of the objects that were copied before; updated.

    Raises:
        StoreError: the bucket cannot be read, or an object's name leads out of the folder.
    """
    source, copied = Store(address, folder), {} if copied is None else copied
    there = source.list_objects()
    for name in there:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise StoreError(f"{address}: refused, object '{name}' would be written outside {folder}")
    changed = [name for name, etag in there.items() if copied.get(name, etag) != etag]
    missing = [name for name in there if name not in copied and not (folder / name).is_file()]
    _warn(address, "new versions, which replace the files here", changed)
    deleted = [name for name in copied if copied[name] == there.get(name) and not (folder / name).is_file()]
    _warn(address, "not copied again, since deleted here", deleted)
    _warn(address, "deleted there, and still here", (name for name in copied.keys() - there if (folder / name).is_file()))
    for name in copied.keys() - there:
        if not (folder / name).is_file():
            del copied[name]
    wanted = dict.fromkeys([*changed, *missing])
    copied |= {name: etag for name, etag in there.items() if name not in wanted}
    _fetch(source, wanted, folder, progress or (lambda done, total: None), there, copied)


def _fetch(source: Store, names: Iterable[str], folder: Path, progress: Progress, there: dict[str, str], copied: dict[str, str]) -> None:
    """Fetch several objects at a time, and add each to `copied` once it is here."""
    is_ending = Event()

    def watch(done: int, total: int) -> None:
        progress(done, total)
        if is_ending.is_set():
            raise StoreError(f"{source.address}: not copied, because the copy of another object ended early")

    def fetch(name: str) -> str:
        source.fetch(name, folder / name, watch)
        return name

    with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
        try:
            for name in pool.map(fetch, names):
                copied[name] = there[name]
        except BaseException:
            is_ending.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _warn(address: str, what: str, names: Iterable[str]) -> None:
    if names := sorted(names):
        more = ", ..." if len(names) > MAX_NAMED else ""
        logger.warning("%s: %s: %s (%s%s)", address, what, counted(len(names), "object"), printable(", ".join(names[:MAX_NAMED])), more)
