"""The board between a flow and one start of a worker group: a Ray actor. It starts quickly because nothing here loads torch.

It ends with its group and its group with it; the driver, which counts the attempts, then starts both again.
"""

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import ray

from dml_core.errors import DmlError, TrainingError
from dml_core.training.history import Progress
from tasks.runs.costs import Cost
from tasks.workers.jobs import Job, JobState

STOP = "stop"
WAIT_SECONDS = 0.5


@ray.remote(num_cpus=0)
class Board:
    """Holds one job at a time for one start of a worker group: set by the driver, taken by the workers, with its state.

    A group does nothing twice: a fault ends it. Queries for a job or its state are answered when there is news, or after half a second.
    """

    def __init__(self) -> None:
        self._job: Job | None = None
        self._state = JobState()
        self._group: tuple[Any, Any] | None = None
        self._beats: dict[int, tuple[float, bool]] = {}
        self._is_to_make_way = self._is_closed = False
        self._for_workers, self._for_driver, self._are_workers_ready = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def hold(self, controller: Any, placement: Any = None) -> None:
        """Store the handles with which the driver ends the group; it has no placement group before its workers' processes exist."""
        self._group = controller, placement

    def held(self) -> tuple[Any, Any] | None:
        """Return the arguments of the last `hold`, or None before the group's controller has started."""
        return self._group

    async def ready(self) -> None:
        """Wait until the workers have started and ask for a job."""
        await self._are_workers_ready.wait()

    def submit(self, job: Job) -> bool:
        """Set the next job, as the previous one is over; return False if closed."""
        if self._is_closed:
            return False
        self._job, self._state = job, JobState()
        self._beats.clear()
        self._for_workers.set()
        return True

    async def next(self) -> Job | str | None:
        """Return the job once, None if there is none, or `STOP` when closed."""
        self._are_workers_ready.set()
        await _news(self._for_workers)
        if self._job is None:
            return STOP if self._is_closed else None
        job, self._job, self._state.is_taken = self._job, None, True
        self._beats[0] = time.monotonic(), True
        return job

    def beat(self, rank: int, patience: bool, used: Cost | None = None) -> bool:
        """Record a worker's heartbeat, with what it has used for its job; return whether the group should stop."""
        self._beats[rank] = time.monotonic(), patience
        if used is not None:
            self._state.used[rank] = used
        return self._is_to_make_way

    def progress(self, message: Progress) -> None:
        """Store a message for the driver's next query."""
        self._state.progress.append(message)

    def end(
        self,
        facts: dict[str, object] | None = None,
        error: DmlError | None = None,
        fault: TrainingError | None = None,
        has_made_way: bool = False,
    ) -> None:
        """Record how the job ended for a worker, in the terms of `JobState`; of several errors or faults the first counts."""
        state = self._state
        state.facts, state.error, state.fault = facts or state.facts, state.error or error, state.fault or fault
        state.has_made_way |= has_made_way
        self._for_driver.set()

    async def look(self) -> JobState:
        """Return the state of the job; each message is returned once."""
        await _news(self._for_driver)
        now = time.monotonic()
        # Workers wait for each other, so the group is alive if any of them is.
        quiet = min((now - at for at, _ in self._beats.values()), default=0.0)
        is_patient = any(patience for _, patience in self._beats.values())
        state = replace(self._state, quiet_seconds=quiet, is_patient=is_patient)
        self._state.progress = []
        return state

    def make_way(self) -> None:
        """Ask the workers to save a checkpoint and end, so that a larger group can replace them."""
        self._is_to_make_way = True

    def close(self) -> None:
        """Accept no more jobs: the workers end."""
        self._is_closed = True
        self._for_workers.set()

    def close_if_idle(self) -> str | None:
        """Close and return `STOP`, unless a job waits for the workers."""
        if self._job is not None:
            return None
        self.close()
        return STOP


async def _news(event: asyncio.Event) -> None:
    """Wait for an event, half a second at most."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), WAIT_SECONDS)
    event.clear()
