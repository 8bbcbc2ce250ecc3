"""Sealed files: records on disk with their format and a SHA-256 that verifies them. Only this module reads and writes them.

A sealed file is JSON: `{"format": 1, "sha256": ..., "record": "<JSON>"}`; the hash covers format and record together.

- A file of a newer format is refused with an error that names it, and stays unchanged. Every format keeps the three keys and the hash.
- An unknown field in a known format is kept (`tasks.runs.records.Record`): a program that adds a field which changes the meaning of others
  raises FORMAT.
- A damaged file (cut, garbled, a folder, a dangling link) is renamed to `<name>.damaged-<N>` with a warning; it is never overwritten.

The seal detects damage, but not a person who changes record and hash together.
"""

import errno
import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import from_json

from dml_core.errors import StoreError
from dml_core.files import set_aside, write_errors
from tasks.files import write_whole
from tasks.locks import alone

FORMAT = 1
DAMAGED_ERRNOS = (errno.EISDIR, errno.ELOOP, errno.ENOTDIR)
Content = TypeVar("Content")
logger = logging.getLogger(__name__)
_adapter: Any = cache(TypeAdapter)  # building one takes milliseconds


class DamagedError(StoreError):
    """A sealed file whose content is not what was written."""


class NewerFormatError(StoreError):
    """A sealed file written by a newer version of the program."""


def seal(record: str) -> str:
    """Return a record in its form on disk, with the format and the SHA-256 of both."""
    return json.dumps({"format": FORMAT, "sha256": _sha256(f"{FORMAT} {record}"), "record": record})


def unseal(data: str | bytes) -> str:
    """Return the record that was sealed.

    Raises:
        ValueError: it is damaged.
        NewerFormatError: it is intact, but of a format that this program does not read; the error names no file.
    """
    try:
        envelope = from_json(data)
        record, version = envelope["record"], envelope["format"]
        is_intact = envelope["sha256"] == _sha256(f"{version} {record}")
    except (TypeError, KeyError):
        is_intact = False  # JSON, but not the output of `seal`
    if is_intact and version in range(1, FORMAT + 1):
        return str(record)
    if is_intact and isinstance(version, int):
        raise NewerFormatError(f"written by a newer version (format {version}, this program reads up to {FORMAT}); update dml-repro")
    raise ValueError("the record does not fit its SHA-256")


def read_bytes(path: Path) -> bytes | None:
    """Return a file's bytes, or None if it does not exist.

    Raises:
        DamagedError: the path is a folder or a dangling link.
        StoreError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise DamagedError(f"{path}: damaged (a link to nothing)") from None
        return None
    except OSError as error:
        if error.errno in DAMAGED_ERRNOS:
            raise DamagedError(f"{path}: damaged ({error.strerror})") from None
        raise StoreError(f"{path}: cannot be read ({error.strerror or error}); make it readable") from None


def read_sealed(path: Path, kind: type[Content]) -> Content | None:
    """Return the content of a sealed file, of a type that pydantic knows, or None if there is no such file.

    Raises:
        DamagedError: it is damaged; it stays unchanged.
        NewerFormatError: a newer version of the program wrote it.
        StoreError: it cannot be read.
    """
    data = read_bytes(path)
    return None if data is None else parse_sealed(path, data, kind)


def parse_sealed(path: Path, data: str | bytes, kind: type[Content]) -> Content:
    """Return the content of the sealed bytes of the file `path`; raises as `read_sealed`."""
    try:
        return _adapter(kind).validate_json(unseal(data))
    except NewerFormatError as error:
        raise NewerFormatError(f"{path}: {error}") from None
    except ValueError:  # pydantic's too
        raise DamagedError(f"{path}: damaged") from None


def read_or_set_aside(path: Path, kind: type[Content]) -> Content | None:
    """Return the content of a sealed file, or None if it does not exist or is damaged; a damaged file is renamed with a warning.

    Raises:
        NewerFormatError, StoreError: as `read_sealed`.
    """
    return or_set_aside(path, partial(read_sealed, path, kind))


def or_set_aside(path: Path, read: Callable[[], Content | None], then: str = "") -> Content | None:
    """Return what `read` returns, or None if the file is damaged: it is then renamed with a warning, which ends with `then`."""
    try:
        return read()
    except DamagedError:
        with alone(path.with_name(".set-aside.lock")):
            try:
                return read()  # another process may have renamed it meanwhile, and written a new one
            except DamagedError as error:
                logger.warning("%s; kept as %s%s", error, move_damaged(path).name, then)
                return None


def check_formats(state: Path) -> None:
    """Check before any work is done that no newer version of the program wrote to a state folder. Damaged files are ignored.

    Raises:
        NewerFormatError: it names the first such file.
    """
    for folder in ("tables", "outbox", "made"):
        for path in sorted((state / folder).rglob("*.json")):
            with suppress(DamagedError):
                read_sealed(path, object)


def move_damaged(path: Path) -> Path:
    """Rename a damaged file and return its new path.

    Raises:
        StoreError: it cannot be renamed.
    """
    try:
        return set_aside(path)
    except OSError as error:
        raise StoreError(f"{path}: damaged, and cannot be renamed ({error.strerror or error}); move it away") from None


def write_sealed(path: Path, content: object, remedy: str = "free space, or change DML_STATE") -> None:
    """Write a sealed file, replacing an existing one.

    Raises:
        StoreError: it cannot be written; the message ends with the remedy.
    """
    with write_errors(f"{path}:", remedy):
        write_whole(path, seal(_adapter(type(content)).dump_json(content).decode()))


def _sha256(text: Any) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
