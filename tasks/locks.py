"""A file lock (flock) held by one thread or process of a machine at a time; the system releases it when its holder ends.

It does not survive kill -9: the lock counts, not the file, which only names the holder. On a network file system that supports flock (NFS
does) it also works between machines.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from dml_core.errors import StoreError

RUNNING = ".running-"


class FileLock:
    """A lock for one holder; another one, in this process or elsewhere, creates its own object with the same path (created if missing)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def acquire(self, wait: bool = True) -> bool:
        """Take the lock, and return True once it is held; without `wait`, return False if another holder has it.

        Raises:
            StoreError: the lock's file cannot be created or opened, or its file system has no locks.
        """
        while True:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = self._path.open("ab", buffering=0)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except OSError:
                    file.close()
                    raise
            except BlockingIOError:
                return False
            except OSError as error:
                remedy = "make it a file that can be written, on a file system with locks (flock)"
                raise StoreError(f"{self._path}: cannot be locked ({error.strerror or error}); {remedy}") from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    self._file = file
                    with suppress(OSError):  # a full disk: the content is only for messages
                        file.truncate(0)
                        file.write(str(os.getpid()).encode())
                    return True
            file.close()  # its holder has removed it: another may have created a new one

    def release(self, remove: bool = False) -> None:
        """Release the lock, if held; with `remove` also remove its file, for places where users would see it."""
        if self._file is not None:
            if remove:
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def holder(self) -> str:
        """Return the process that took the lock last, as text for messages, if its number is known."""
        try:
            return f"process {int(self._path.read_bytes())}"
        except (OSError, ValueError):  # just being taken, damaged, or taken while the disk was full
            return "another process"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Admit one thread of all processes at a time; the others wait."""
    lock = FileLock(path)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def running(folder: Path) -> FileLock:
    """Take a new lock that shows, while it is held, that something is running and since when."""
    lock = FileLock(folder / f"{RUNNING}{uuid4().hex}")
    lock.acquire()
    return lock


def running_since(folder: Path) -> float:
    """Return when the oldest holder of a `running` lock began, in seconds since the epoch, or infinity."""
    since = float("inf")
    for path in folder.glob(f"{RUNNING}*"):
        lock = FileLock(path)
        try:
            began = path.stat().st_mtime
        except FileNotFoundError:
            continue  # it has ended meanwhile
        if lock.acquire(wait=False):
            lock.release(remove=True)  # its holder was killed, or has ended
        else:
            since = min(since, began)
    return since
