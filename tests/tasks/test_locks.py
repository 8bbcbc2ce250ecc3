"""A lock with one holder at a time: in one process, between processes, and after a holder is killed."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dml_core.errors import StoreError
from tasks.locks import FileLock, alone, running, running_since

HOLD = """
import pathlib, sys, time
from tasks.locks import FileLock
lock = FileLock(pathlib.Path(sys.argv[1]))
print(lock.acquire(), flush=True)
time.sleep(60)
"""


def test_two_holders_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    one, other = FileLock(tmp_path / "new/lock"), FileLock(tmp_path / "new/lock")
    assert one.acquire(wait=False)
    assert not other.acquire(wait=False)
    one.release()
    one.release()  # a second release has no effect
    assert other.acquire(wait=False)
    assert not one.acquire(wait=False)
    other.release()


def test_a_killed_holder_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    lock = FileLock(path)
    assert not lock.acquire(wait=False)
    assert lock.holder() == f"process {holder.pid}"
    holder.kill()
    holder.communicate()
    assert lock.acquire(wait=False)
    lock.release()


def test_what_the_file_says_is_for_people_only(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert FileLock(path).holder() == "another process"
    path.write_bytes(b"\xff garbled")
    assert FileLock(path).holder() == "another process"
    with alone(path):
        assert not FileLock(path).acquire(wait=False)


def test_a_lock_is_taken_although_the_disk_has_no_room_for_its_holder_s_number(tmp_path: Path) -> None:
    program = """
import pathlib, resource, signal, sys
from tasks.locks import FileLock
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # every write fails, as on a full disk
lock, other = (FileLock(pathlib.Path(sys.argv[1])) for _ in range(2))
print(lock.acquire(wait=False), other.acquire(wait=False), other.holder())
lock.release()
print(other.acquire(wait=False))
"""
    printed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "lock")], check=True, capture_output=True, text=True)
    assert printed.stdout.splitlines() == ["True False another process", "True"]


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # as of Lustre without `-o flock`

    monkeypatch.setattr(fcntl, "flock", flock)
    for wait in (True, False):
        with pytest.raises(StoreError, match=r"lock: cannot be locked \(Function not implemented\); .* file system with locks"):
            FileLock(tmp_path / "lock").acquire(wait)


def test_threads_are_inside_one_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    most = 0

    def enter() -> None:
        nonlocal most
        with alone(tmp_path / "lock"):
            inside.append(1)
            most = max(most, len(inside))
            threading.Event().wait(0.01)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_of_a_lock_whose_file_is_removed_there_is_one_holder_too(tmp_path: Path) -> None:
    """A process that waits on a file removed by its holder takes the next file."""
    lock, inside, most = tmp_path / "lock", [], []

    def enter() -> None:
        for _ in range(200):
            mine = FileLock(lock)
            mine.acquire()
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            mine.release(remove=True)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert not lock.exists()


def test_the_oldest_that_runs_counts_and_a_killed_one_does_not(tmp_path: Path) -> None:
    assert running_since(tmp_path) == float("inf")
    first, second = running(tmp_path), running(tmp_path)
    for path, when in zip(sorted(tmp_path.iterdir()), (100.0, 200.0), strict=True):
        os.utime(path, (when, when))
    assert running_since(tmp_path) == 100.0
    for lock in (first, second):
        lock.release()  # as the system does after kill -9: the file remains
    assert running_since(tmp_path) == float("inf")
    assert not list(tmp_path.iterdir())
