"""Safe file access: only regular files are read, new files replace old ones atomically, JSON carries its own hash."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from dml_core.errors import StoreError

SEAL = "sha256"  # key of the hash of all other values
SET_ASIDE = ".damaged-"
LEFTOVER = r"\..+\.[0-9a-f]{32}"  # name of a file that a killed process was writing (`writing`)


def check_regular(path: Path) -> None:
    """Reject anything but a regular file: opening a named pipe blocks forever, and reading a device never ends.

    Raises:
        OSError: the file is missing or not regular.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, kind, str(path))


def read_regular(path: Path) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: the file is missing, unreadable or not regular.
    """
    check_regular(path)
    return path.read_bytes()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file in hexadecimal.

    Raises:
        OSError: the file is missing, unreadable or not regular.
    """
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file, open for reading and writing, that replaces `path` at the end: flushed to disk, with the permissions of the umask.

    After an error `path` is unchanged and the new file is removed.
    """
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with beside.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Admit one process at a time; the others wait. The system releases the lock, a file, when a process ends.

    Raises:
        OSError: the file cannot be created or locked, or is not regular.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    check_regular(lock)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def write_errors(what: str, remedy: str) -> Iterator[None]:
    """Report an OSError of the body as a StoreError.

    Args:
        what: what cannot be written, such as `path:`.
        remedy: advice at the end of the message.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what} cannot be written ({error.strerror or error}); {remedy}") from None


def remove_leftovers(folder: Path) -> None:
    """Remove the files that killed processes were writing in a folder (`writing`); no other process may be writing there."""
    with suppress(OSError):
        for path in folder.iterdir():
            if re.fullmatch(LEFTOVER, path.name):
                path.unlink()


def replace_folder(new: Path, folder: Path) -> None:
    """Rename the folder `new` to `folder`, replacing an existing one. If two processes do this at once, the later one wins.

    Raises:
        OSError: the renaming failed, or `folder` is a file.
    """
    while True:
        try:
            new.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            old = folder.with_name(f".{folder.name}.{uuid4().hex}")
            with suppress(FileNotFoundError):  # the other process has moved it already
                folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        else:
            return


def set_aside(path: Path, hidden: bool = False) -> Path:
    """Rename a file, link or folder to `<name>.damaged-<N>`, N counting from 1, and return the new path; earlier ones are kept.

    Processes that may do this at the same time must hold a lock.

    Args:
        path: the damaged file, link or folder.
        hidden: let the new name begin with a dot.

    Raises:
        OSError: `path` cannot be renamed.
    """
    name = f"{'.' if hidden else ''}{path.name}{SET_ASIDE}"
    aside = next(aside for number in count(1) if not os.path.lexists(aside := path.with_name(f"{name}{number}")))
    return path.rename(aside)


def sealed(values: Mapping[str, Any]) -> str:
    """Return plain values, including `format`, as JSON text with their hash."""
    return json.dumps({**values, SEAL: json_sha256(values)}, indent=1) + "\n"


def unsealed(data: bytes, path: Path, newest: int, remedy: str) -> dict[str, Any]:
    """Return the values of JSON text written by `sealed`.

    Args:
        data: the text.
        path: name used in errors.
        newest: highest format that the caller reads.
        remedy: advice to print if the text is damaged.

    Raises:
        StoreError: the text is damaged or of a newer format.
    """
    try:
        values = json.loads(data)
        version = values["format"]
        if not isinstance(version, int):
            raise ValueError
    except (ValueError, RecursionError, KeyError, TypeError):
        raise StoreError(f"{path}: damaged; {remedy}") from None
    if version > newest:
        raise StoreError(
            f"{path}: written by a newer version (format {version}, this program reads up to {newest}); update this program, or {remedy}"
        )
    if values.pop(SEAL, None) != json_sha256(values):
        raise StoreError(f"{path}: damaged or changed by hand (SHA-256 differs); {remedy}")
    return dict(values)


def json_sha256(values: object) -> str:
    """Return the SHA-256 of plain values as JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
