"""Run `dml` commands, and functions, in processes forked from one that has imported what verbs need: they start in a fraction of a second.

Commands that run at once wait for each other before they begin and before each of the first files that either renames or removes, so that
both have read before either writes. This module imports nothing heavy because each process imports it.
"""

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

MEETINGS, MEETING_SECONDS = 6, 0.3  # meetings of two processes; one that waits alone continues after this time
SETTINGS = ("DML_", "RAY_", "PREFECT_", "MLFLOW_")  # environment variables of the project and its services begin so
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


def forked(work: Callable[..., None], *arguments: Any) -> int:
    """Run a function in a forked process with one thread, and return the exit code."""
    process = CONTEXT.Process(target=_begin, args=(work, *arguments))
    process.start()
    process.join(300)
    assert process.exitcode is not None, "the forked process does not end"
    return process.exitcode


def forked_on_small_disk(num_bytes: int, work: Callable[..., None], *arguments: Any) -> int:
    """Run a function as `forked`, in a process no file of which can grow above a size, as on a disk that fills up."""
    return forked(_on_small_disk, num_bytes, work, *arguments)


def _on_small_disk(num_bytes: int, work: Callable[..., None], *arguments: Any) -> None:
    sys.dont_write_bytecode = True  # Python would keep what it compiles, cut to this size
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    work(*arguments)


def dml(words: Sequence[str], cwd: Path, max_bytes: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `dml` in a forked process; its environment is this process's without the project's settings, and `environment`.

    With `max_bytes` none of its files can grow above this size.
    """
    run = forked if max_bytes is None else partial(forked_on_small_disk, max_bytes)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        code = run(call, list(words), cwd, printed, kept | environment)
        return subprocess.CompletedProcess(words, code, *(path.read_text() for path in printed))


def call(words: list[str], cwd: Path, printed: Sequence[Path], environment: dict[str, str]) -> None:
    """Run `dml` in this forked process, which writes its standard output and error to the two files of `printed`."""
    from flows.cli import main

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = ["dml", *words]
    main()


def call_with(barrier: Any, words: list[str], root: Path, log: Path) -> None:
    """Run `dml` in this forked process; with a barrier, synchronised with another process."""
    if barrier is not None:
        sys.addaudithook(partial(meet, barrier, str(root), [MEETINGS]))
        barrier.wait(120)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    call(words, root, [log, log], kept)


def _begin(work: Callable[..., None], *arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    work(*arguments)


def meet(barrier: Any, root: str, left: list[int], event: str, arguments: tuple[Any, ...]) -> None:
    """Wait for the other process before a file of the project is renamed or removed, up to `left` times."""
    if event in ("os.rename", "os.remove", "shutil.rmtree") and left[0] and str(arguments[0]).startswith(root):
        left[0] -= 1
        try:
            barrier.wait(MEETING_SECONDS)
        except BrokenBarrierError:
            barrier.reset()


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    printed: str


class Processes:
    """Commands in forked processes, whose output goes to files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0

    def at_once(self, root: Path, *commands: list[str]) -> list[Ended]:
        """Run commands at the same time and return how they ended."""
        barrier = CONTEXT.Barrier(len(commands)) if len(commands) > 1 else None
        logs = [self._folder / f"{self._number + number}.log" for number in range(len(commands))]
        self._number += len(commands)
        started = [
            CONTEXT.Process(target=_begin, args=(call_with, barrier, words, root, log)) for words, log in zip(commands, logs, strict=True)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(300)
        return [Ended(int(process.exitcode or 0), log.read_text()) for process, log in zip(started, logs, strict=True)]

    def one_by_one(self, root: Path, *commands: list[str]) -> list[Ended]:
        """Run commands one after the other and return how they ended."""
        return [self.at_once(root, words)[0] for words in commands]
