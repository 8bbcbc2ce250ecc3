"""When a run's state is written between the ends of its epochs, when it stops, and who writes: a thread, so that no step waits for a disk.

Nothing here changes a result.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dml_core.training.parallel import Failures, rank, world_size

LOOK_SECONDS = 0.5
MAX_STEPS_BETWEEN_LOOKS = 1000


class InterruptedRunError(Exception):
    """A run that was asked to stop has stopped; it goes on from the checkpoint that it left."""


@dataclass(frozen=True)
class Saving:
    """How the state of a run is kept beside the ends of its epochs.

    Attributes:
        every_steps: a checkpoint each time so many steps are done; None for none by steps.
        every_minutes: a checkpoint when the last one is so old, unless one is being written; None for none by time.
        in_background: whether files are written while steps go on. At most one checkpoint waits for the disk: the next waits for it.
        saved: called on rank 0, by whoever writes, when a checkpoint is in place.
        stop_wanted: asked about twice a second and at most once a step, on every worker as often as on the others. Where it is true on
            one, all write a checkpoint at the end of that step and raise `InterruptedRunError`. None never stops.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    in_background: bool = False
    saved: Callable[[], None] = lambda: None
    stop_wanted: Callable[[], bool] | None = None


AT_EPOCHS_ENDS = Saving()


class Writer:
    """Writes one thing after another, in a thread where that is asked for. What fails is raised by a later call."""

    def __init__(self, in_background: bool) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoints") if in_background else None
        self._begun: list[Future[None]] = []

    @property
    def is_behind(self) -> bool:
        """Whether something is not written yet."""
        return any(not future.done() for future in self._begun)

    def check(self) -> None:
        """Raise what has failed, so that no more is trained than need be which nothing keeps."""
        for future in [future for future in self._begun if future.done()]:
            self._begun.remove(future)
            future.result()

    def write(self, work: Callable[[], None]) -> None:
        """Have `work` done, after all that came before it."""
        self.check()
        if self._pool is None:
            work()
        else:
            self._begun.append(self._pool.submit(work))

    def finish(self) -> None:
        """Wait until all is written."""
        while self._begun:
            self._begun.pop(0).result()

    def close(self) -> None:
        """Wait, and end the thread; what fails now is not raised."""
        if self._pool is not None:
            self._pool.shutdown()


class Watch:
    """Whether a checkpoint is due after a step, and whether to stop there: the same answer on every worker.

    What only one worker knows (the time that has passed, a signal, a failure) is exchanged about twice a second: rank 0 says after how many
    steps.
    """

    def __init__(self, saving: Saving, device: torch.device, is_behind: Callable[[], bool], failures: Failures) -> None:
        self._saving = saving
        self._device = device
        self._is_behind = is_behind
        self._failures = failures
        self._num_until_look = self._num_between = 1
        self._looked = self._saved = time.monotonic()

    def saved(self) -> None:
        """A checkpoint was taken."""
        self._saved = time.monotonic()

    def look(self, num_steps_done: int) -> tuple[bool, bool]:
        """Whether a checkpoint is due, and whether to stop; called by every worker after every step.

        Raises:
            Exception: what failed on one worker, on all.
        """
        every = self._saving.every_steps
        due = every is not None and num_steps_done % every == 0
        if world_size() == 1 and self._saving.every_minutes is None and self._saving.stop_wanted is None:
            return due, False
        self._num_until_look -= 1
        if self._num_until_look > 0:
            return due, False
        old, stop, self._num_between = self._exchange()
        self._num_until_look = self._num_between
        return due or bool(old), bool(stop)

    def _exchange(self) -> tuple[int, int, int]:
        now = time.monotonic()
        seconds_a_step = max((now - self._looked) / self._num_between, 1e-6)
        self._looked = now
        stop = False
        with self._failures.kept():
            stop = bool(self._saving.stop_wanted is not None and self._saving.stop_wanted())
        said = [0, int(stop), 0, int(self._failures.exist)]
        if rank() == 0:
            every = self._saving.every_minutes
            old = every is not None and now - self._saved >= 60 * every and not self._is_behind()
            said = [int(old), int(stop), min(max(1, int(LOOK_SECONDS / seconds_a_step)), MAX_STEPS_BETWEEN_LOOKS), said[3]]
        if world_size() > 1:
            heard = torch.tensor(said, device=self._device)
            dist.all_reduce(heard, op=dist.ReduceOp.MAX)
            said = heard.tolist()
        old_, stop_, num_steps, has_failed = said
        if has_failed:
            self._failures.raise_together()
        return old_, stop_, num_steps
