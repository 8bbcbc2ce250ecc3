"""Checkpoints within epochs, requests to stop, and a writer thread, so that no step waits for a disk.

Nothing here changes a result.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dml_core.training.parallel.workers import Failures, rank, world_size
from dml_core.training.pulse import patient

LOOK_SECONDS = 0.5
MAX_STEPS_BETWEEN_LOOKS = 1000


class InterruptedRunError(Exception):
    """A run that stopped on request; it can be resumed from its checkpoint."""


@dataclass(frozen=True)
class Saving:
    """Times at which a run saves its state within epochs.

    Attributes:
        every_steps: steps between checkpoints; None for none by steps.
        every_minutes: age of the last checkpoint at which a new one is due, unless one is being written; None for none by time.
        in_background: write files while training continues. At most one checkpoint waits for the disk: the next waits for it.
        saved: called on rank 0, in the writing thread, after each checkpoint.
        stop_wanted: called about twice a second and at most once a step, equally often on every worker. If it is True on one, all write a
            checkpoint at the end of that step and raise `InterruptedRunError`. None never stops.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    in_background: bool = False
    saved: Callable[[], None] = lambda: None
    stop_wanted: Callable[[], bool] | None = None


AT_EPOCHS_ENDS = Saving()


class Writer:
    """Performs one write after another, optionally in a thread. Errors are raised by a later call."""

    def __init__(self, in_background: bool) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoints") if in_background else None
        self._begun: list[Future[None]] = []

    @property
    def is_behind(self) -> bool:
        """True if a write is unfinished."""
        return any(not future.done() for future in self._begun)

    def check(self) -> None:
        """Raise the error of a finished write, so that training does not continue unsaved."""
        for future in [future for future in self._begun if future.done()]:
            self._begun.remove(future)
            future.result()

    def write(self, work: Callable[[], None]) -> None:
        """Perform `work` after all earlier work."""
        self.check()
        if self._pool is None:
            work()
        else:
            self._begun.append(self._pool.submit(work))

    def finish(self) -> None:
        """Wait until everything is written; with the heartbeat's patience, as this may take long."""
        with patient():
            while self._begun:
                self._begun.pop(0).result()

    def close(self) -> None:
        """Wait, and end the thread; errors are not raised any more."""
        if self._pool is not None:
            with patient():
                self._pool.shutdown()


class Watch:
    """Decides after each step whether a checkpoint is due and whether to stop, the same on every worker.

    State known to only one worker (elapsed time, a signal, a failure) is exchanged about twice a second, after a number of steps set by
    rank 0.
    """

    def __init__(self, saving: Saving, device: torch.device, is_behind: Callable[[], bool], failures: Failures) -> None:
        self._saving = saving
        self._device = device
        self._is_behind = is_behind
        self._failures = failures
        self._num_until_look = self._num_between = 1
        self._looked = self._saved = time.monotonic()

    def saved(self) -> None:
        """Record that a checkpoint was taken."""
        self._saved = time.monotonic()

    def look(self, num_steps_done: int) -> tuple[bool, bool]:
        """Return whether a checkpoint is due and whether to stop; called by every worker after every step.

        Raises:
            Exception: an error of one worker, on all.
        """
        every = self._saving.every_steps
        due = every is not None and num_steps_done % every == 0
        if world_size() == 1 and self._saving.every_minutes is None and self._saving.stop_wanted is None:
            return due, False
        self._num_until_look -= 1
        if self._num_until_look > 0:
            return due, False
        is_old, stop, self._num_between = self._exchange()
        self._num_until_look = self._num_between
        return due or is_old, stop

    def _exchange(self) -> tuple[bool, bool, int]:
        """Return whether a checkpoint is due by time, whether to stop, and the steps until the next exchange, the same on every worker."""
        now = time.monotonic()
        seconds_a_step = max((now - self._looked) / self._num_between, 1e-6)
        self._looked = now
        stop = False
        with self._failures.kept():
            stop = bool(self._saving.stop_wanted is not None and self._saving.stop_wanted())
        is_due, num_steps = False, 0
        if rank() == 0:
            every = self._saving.every_minutes
            is_due = every is not None and now - self._saved >= 60 * every and not self._is_behind()
            num_steps = min(max(1, int(LOOK_SECONDS / seconds_a_step)), MAX_STEPS_BETWEEN_LOOKS)
        state = torch.tensor([is_due, stop, num_steps, self._failures.exist], dtype=torch.int64)
        if world_size() > 1:
            state = state.to(self._device)
            dist.all_reduce(state, op=dist.ReduceOp.MAX)
        is_due, stop, num_steps, has_failed = state.tolist()
        if has_failed:
            self._failures.raise_together()
        return bool(is_due), bool(stop), num_steps
