"""Copies of a bucket's objects: the raw files of a dataset with a `mirror`, and backups."""

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from dml_core.data.readers.shared.archives import Progress
from dml_core.errors import StoreError, printable
from tasks.storage import Store
from tasks.wording import counted

FETCHED_AT_ONCE = 8
Copied = dict[str, tuple[str, int | None]]  # name -> ETag, and the time of change of the file that was copied from it
MAX_NAMED = 5  # objects in a warning
logger = logging.getLogger(__name__)


def copy_objects(address: str, folder: Path, progress: Progress | None = None, copied: Copied | None = None) -> None:
    """Copy the objects below `s3://bucket/prefix` that `folder` lacks; other files stay, and an interrupted copy resumes.

    Object names below the prefix become paths in the folder. New versions of objects that were copied before replace their files, unless
    these changed here. Warnings name both, files that are deleted here, which stay so, and those that are deleted there, which stay.

    Args:
        address, folder: from where, and to where.
        progress: called with (bytes done, total bytes) of each object.
        copied: objects that were copied before, or whose files were here; updated.

    Raises:
        StoreError: the bucket cannot be read, or an object's name leads out of the folder.
    """
    source, copied = Store(address, folder), {} if copied is None else copied
    there = source.list_objects()
    for name in there:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise StoreError(f"{address}: refused, object '{name}' would be written outside {folder}")
    changed = [name for name, etag in there.items() if name in copied and copied[name][0] != etag]
    own = {name for name in changed if (folder / name).is_file() and (folder / name).stat().st_mtime_ns != copied[name][1]}
    replaced = [name for name in changed if name not in own]
    deleted = [name for name in copied.keys() & there if name not in changed and not (folder / name).is_file()]
    _warn(address, "new versions, which replace the files here", replaced)
    _warn(address, "new versions, not copied over files that changed here", own)
    _warn(address, "not copied again, since deleted here", deleted)
    _warn(address, "deleted there, and still here", (name for name in copied.keys() - there if (folder / name).is_file()))
    for name in copied.keys() - there:
        if not (folder / name).is_file():
            del copied[name]
    missing = [name for name in there if name not in copied and not (folder / name).is_file()]
    wanted = {name: there[name] for name in (*replaced, *missing)}
    for name in there.keys() - wanted:
        copied.setdefault(name, (there[name], None))
    _fetch(source, wanted, folder, progress or (lambda done, total: None), copied)


def _fetch(source: Store, etags: Mapping[str, str], folder: Path, progress: Progress, copied: Copied) -> None:
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
            for name in pool.map(fetch, etags):
                copied[name] = etags[name], (folder / name).stat().st_mtime_ns
        except BaseException:
            is_ending.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _warn(address: str, what: str, names: Iterable[str]) -> None:
    if names := sorted(names):
        more = ", ..." if len(names) > MAX_NAMED else ""
        logger.warning("%s: %s: %s (%s%s)", address, what, counted(len(names), "object"), printable(", ".join(names[:MAX_NAMED])), more)
