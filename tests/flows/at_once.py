"""Run several `dml` commands at once, in processes forked from one that has imported what verbs need, so that they start fast and overlap.

Two processes wait for each other before they begin and before each of the first files that either renames or removes, so that both have
read before either writes. This module imports nothing heavy because each process imports it.
"""

import multiprocessing
import os
import sys
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

from flows.cli.app import VERBS

MEETINGS, MEETING_SECONDS = 6, 0.3  # meetings of two processes; one that waits alone continues after this time
PRELOADED = [
    "flows.cli.exits", *(f"flows.cli.{module}" for module, _ in VERBS.values()), "torch", "faiss", "plotly", "pyarrow.parquet",
    "dml_core.data.prepare", "dml_core.index.writing", "tasks.data", "tasks.gc", "tasks.plans.plan", "tasks.reports.run_pages",
    "tasks.reports.table_pages", "tasks.scores.scoring", "tasks.models.embed", "tasks.models.export", "tasks.models.indexing",
    "tasks.models.searching",
]  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    printed: str


def call(words: list[str], root: Path, log: Path, barrier: Any) -> None:
    """Run `dml` in this forked process; with a barrier, synchronised with another process."""
    import torch

    from flows.cli import main

    for name in [name for name in os.environ if name.startswith(("DML_", "RAY_", "PREFECT_", "MLFLOW_"))]:
        del os.environ[name]
    os.chdir(root)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    torch.set_num_threads(1)
    sys.argv = ["dml", *words]
    if barrier is not None:
        sys.addaudithook(partial(meet, barrier, str(root), [MEETINGS]))
        barrier.wait(120)
    main()


def meet(barrier: Any, root: str, left: list[int], event: str, arguments: tuple[Any, ...]) -> None:
    """Wait for the other process before a file of the project is renamed or removed, up to `left` times."""
    if event in ("os.rename", "os.remove", "shutil.rmtree") and left[0] and str(arguments[0]).startswith(root):
        left[0] -= 1
        try:
            barrier.wait(MEETING_SECONDS)
        except BrokenBarrierError:
            barrier.reset()


class Processes:
    """Commands in processes forked from one that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._folder, self._number = folder, 0

    def at_once(self, root: Path, *commands: list[str]) -> list[Ended]:
        """Run commands at the same time and return how they ended."""
        barrier = self._context.Barrier(len(commands)) if len(commands) > 1 else None
        logs = [self._folder / f"{self._number + number}.log" for number in range(len(commands))]
        self._number += len(commands)
        started = [self._context.Process(target=call, args=(words, root, log, barrier)) for words, log in zip(commands, logs, strict=True)]
        for process in started:
            process.start()
        for process in started:
            process.join(300)
        return [Ended(int(process.exitcode or 0), log.read_text()) for process, log in zip(started, logs, strict=True)]

    def one_by_one(self, root: Path, *commands: list[str]) -> list[Ended]:
        """Run commands one after the other and return how they ended."""
        return [self.at_once(root, words)[0] for words in commands]

    def close(self) -> None:
        """End the process that has imported everything."""
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
