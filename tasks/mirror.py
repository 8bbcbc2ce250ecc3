"""Copies of a bucket's objects: the raw files of a dataset with a `mirror`, and backups."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Event, Lock
from time import monotonic

from dml_core.data.readers.shared.archives import Progress
from dml_core.errors import StoreError, printable
from tasks.files import write_whole
from tasks.storage import Store
from tasks.wording import counted

FETCHED_AT_ONCE = 8
PART_BYTES = 8 * 2**20  # in which boto3 and the AWS command line upload large objects
SAVED_EVERY_SECONDS = 60.0
MAX_NAMED = 5  # objects in a warning
Copied = dict[str, tuple[str, int | None]]  # name -> ETag, and the time of change of the file that has its content, None if none has
logger = logging.getLogger(__name__)


def copy_objects(
    address: str, folder: Path, progress: Progress | None = None, record: Path | None = None, keeps_deleted: bool = False
) -> None:
    """Copy the objects below `s3://bucket/prefix` that `folder` lacks; other files stay, and an interrupted copy resumes.

    Object names below the prefix become paths in the folder. With a `record`, new versions of objects replace their files, unless these
    changed here. Warnings name both, files that are deleted here, if they stay so, and those that are deleted there, which stay.

    Args:
        address, folder: from where, and to where.
        progress: called with (bytes done, total bytes), of many objects with (objects done, all objects).
        record: file that has what was copied before; without it, or files in the folder, all missing ones are copied.
        keeps_deleted: do not copy again what was deleted here.

    Raises:
        StoreError: the bucket cannot be read, or an object's name leads out of the folder, or to the file or folder of another.
    """
    source = Store(address, folder)
    there = source.list_objects(is_first=True)
    for name in there:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise StoreError(f"{address}: refused, object '{name}' would be written outside {folder}")
    paths = Counter(map(PurePosixPath, there))  # "a//b" and "a/b" are one
    for name in there:
        if paths[PurePosixPath(name)] > 1 or any(parent in paths for parent in PurePosixPath(name).parents):
            raise StoreError(f"{address}: refused, object '{name}' and another would be one file, or a file and its folder; rename one")
    copied = _read(record, folder)
    here = {name for name in {*there, *copied} if (folder / name).is_file()}
    if record is not None:
        _add_unrecorded(address, copied, {name: there[name] for name in there if name in here and name not in copied}, folder)
    changed = {name for name, etag in there.items() if name in copied and copied[name][0] != etag}
    touched = {name for name in changed & here if (folder / name).stat().st_mtime_ns != copied[name][1]}  # or copied, as by `cp -r`
    own = {name for name in touched if not _is_copy(folder / name, copied[name][0])}
    deleted = (copied.keys() & there) - here - changed if keeps_deleted else set()
    _warn(address, "new versions, which replace the files here", changed - own)
    _warn(address, "new versions, not copied over other files (remove these to get them)", own)
    _warn(address, f"not copied again, since deleted here (to get them, remove {record})", deleted)
    _warn(address, "deleted there, and still here", (copied.keys() & here) - there.keys())
    for name in copied.keys() - there - here:
        del copied[name]
    missing = there.keys() - here - deleted
    wanted = {name: there[name] for name in there if name in missing or name in changed - own}
    _fetch(source, wanted, folder, progress or (lambda done, total: None), copied, record)


def _read(record: Path | None, folder: Path) -> Copied:
    copied: Copied = {}
    if record is not None and record.is_file() and folder.is_dir() and any(folder.iterdir()):
        with suppress(ValueError):  # damaged
            copied = json.loads(record.read_bytes())
    return copied


def _add_unrecorded(address: str, copied: Copied, etags: Mapping[str, str], folder: Path) -> None:
    """Add objects whose files were not recorded, as those of a copy that was killed, and compare these."""
    with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
        same = pool.map(lambda name: _is_copy(folder / name, etags[name]), etags)
        copied |= {
            name: (etags[name], (folder / name).stat().st_mtime_ns if is_copy else None) for name, is_copy in zip(etags, same, strict=True)
        }
    _warn(address, "not copied over files that are others or cannot be compared", (name for name in etags if copied[name][1] is None))


def _is_copy(path: Path, etag: str) -> bool:
    """Return whether a file has an object's content, by its ETag: the MD5, of a large object that of its parts' MD5."""
    with path.open("rb") as file:
        if "-" not in etag:
            return hashlib.file_digest(file, "md5").hexdigest() == etag.strip('"')
        parts = [hashlib.md5(part).digest() for part in iter(lambda: file.read(PART_BYTES), b"")]
    return f"{hashlib.md5(b''.join(parts)).hexdigest()}-{len(parts)}" == etag.strip('"')


def _fetch(source: Store, etags: Mapping[str, str], folder: Path, progress: Progress, copied: Copied, record: Path | None) -> None:
    """Fetch several objects at a time, and add each to `copied` and, from time to time, to the record once it is here."""
    is_ending, changing, saved = Event(), Lock(), monotonic()
    arrived, received = set[str](), dict[str, tuple[int, int]]()  # names; of each the bytes done and all

    def save() -> None:
        if record is not None:
            write_whole(record, json.dumps(copied))

    def watch(name: str, done: int, total: int) -> None:
        with changing:
            received[name] = done, total
            if len(etags) <= FETCHED_AT_ONCE:
                progress(sum(done for done, _ in received.values()), sum(total for _, total in received.values()))
        if is_ending.is_set():
            raise StoreError(f"{source.address}: not copied, because the copy of another object ended early")

    def fetch(name: str) -> None:
        nonlocal saved
        source.fetch(name, folder / name, partial(watch, name))
        with changing:
            arrived.add(name)
            if len(etags) > FETCHED_AT_ONCE:
                progress(len(arrived), len(etags))
            copied[name] = etags[name], (folder / name).stat().st_mtime_ns
            if monotonic() - saved > SAVED_EVERY_SECONDS:
                save()
                saved = monotonic()

    with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
        try:
            for _ in pool.map(fetch, etags):
                pass
        except BaseException:
            is_ending.set()  # `map` itself cancels those that have not begun
            raise
        finally:
            with changing:
                save()


def _warn(address: str, what: str, names: Iterable[str]) -> None:
    if names := sorted(names):
        more = ", ..." if len(names) > MAX_NAMED else ""
        logger.warning("%s: %s: %s (%s%s)", address, what, counted(len(names), "object"), printable(", ".join(names[:MAX_NAMED])), more)
