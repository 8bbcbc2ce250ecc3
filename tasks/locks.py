"""One holder at a time, of all threads and processes of a machine: a lock on a file (flock), released by the system when its holder ends.

After kill -9 nothing is left of it: what counts is the lock and not the file, which says whose the lock is. On a network file system that
passes flock on (NFS does) it holds between machines too.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

from dml_core.errors import StoreError

RUNNING = ".running-"


class FileLock:
    """One holder's way to a lock; another holder, in this process or elsewhere, makes his own with the same path.

    Args:
        path: the lock's file; made where it is missing, with its folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def acquire(self, wait: bool = True) -> bool:
        """Take the lock; without `wait`, only if nobody has it. Whether it was taken.

        Raises:
            StoreError: the lock's file cannot be written.
        """
        while True:
            file = self._open()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                file.close()
                return False
            if self._is_there(file):
                break
            file.close()  # its holder has removed it: another one may have made it anew
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return True

    def _open(self) -> IO[str]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._path.open("a")
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be locked ({error.strerror or error}); make it a file that can be written") from None

    def _is_there(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self, remove: bool = False) -> None:
        """Let go of the lock, where it is held; with `remove` its file goes too, for a place where a person would find it."""
        if self._file is not None:
            if remove:
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def holder(self) -> str:
        """The process that took it last, as a person is told of it."""
        try:
            return f"process {int(self._path.read_bytes())}"
        except (OSError, ValueError):  # just being taken, or damaged: it is there to be read by people
            return "another process"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One thread at a time inside, of all processes; the others wait."""
    lock = FileLock(path)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def running(folder: Path) -> FileLock:
    """Take a new lock that shows for as long as it is held that something is running, and since when."""
    lock = FileLock(folder / f"{RUNNING}{uuid4().hex}")
    lock.acquire()
    return lock


def running_since(folder: Path) -> float:
    """When the oldest of those that are `running` began, in seconds since the epoch; infinity where none is."""
    since = float("inf")
    for path in folder.glob(f"{RUNNING}*"):
        lock = FileLock(path)
        try:
            began = path.stat().st_mtime
        except FileNotFoundError:
            continue  # it has ended meanwhile
        if lock.acquire(wait=False):
            lock.release(remove=True)  # it was killed, or has ended
        else:
            since = min(since, began)
    return since
