"""The board between a flow and one start of a worker group, an actor of Ray's. It starts at once: nothing here loads torch.

It dies with its group and its group with it: the driver, which counts the attempts, starts both anew.
"""

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import ray

from dml_core.training.history import Progress
from tasks.workers.jobs import Job, Outcome

STOP = "stop"
WAIT_SECONDS = 0.5


@ray.remote(num_cpus=0)
class Board:
    """The job of one start of a worker group: set by the driver, taken by the workers, and how it stands.

    Nothing is done twice by one group: a fault in it ends it. Who asks for a job or for how it stands is answered when there is something
    new, or after half a second.
    """

    def __init__(self) -> None:
        self._job: Job | None = None
        self._outcome = Outcome()
        self._group: tuple[Any, Any] | None = None
        self._beats: dict[int, tuple[float, bool]] = {}
        self._is_to_make_way = self._is_closed = False
        self._for_workers, self._for_driver = asyncio.Event(), asyncio.Event()

    def hold(self, controller: Any, placement: Any) -> None:
        """Keep what the driver ends the group by."""
        self._group = controller, placement

    def held(self) -> tuple[Any, Any] | None:
        """What `hold` was given; None until the workers' processes are there."""
        return self._group

    def submit(self, job: Job) -> None:
        """Set the next job; the last one is over."""
        self._job, self._outcome = job, Outcome()
        self._beats.clear()
        self._for_workers.set()

    async def next(self) -> Job | str | None:
        """The job, once; None while there is none; `STOP` when closed."""
        await _news(self._for_workers)
        if self._job is None:
            return STOP if self._is_closed else None
        job, self._job, self._outcome.is_taken = self._job, None, True
        self._beats[0] = time.monotonic(), True
        return job

    def beat(self, rank: int, patience: bool) -> bool:
        """A worker's work goes on; whether the group is to make way for another."""
        self._beats[rank] = time.monotonic(), patience
        return self._is_to_make_way

    def progress(self, message: Progress) -> None:
        """Keep a message for the driver, who hears of it when it looks next."""
        self._outcome.progress.append(message)

    def note_fault(self, fault: str) -> None:
        """What ends the group; the first word on it counts, whichever worker speaks."""
        self._outcome.fault = self._outcome.fault or fault
        self._for_driver.set()

    def note_way_made(self) -> None:
        """The job's workers have left a checkpoint, and end."""
        self._outcome.has_made_way = True
        self._for_driver.set()

    def finish(self, facts: dict[str, object]) -> None:
        """The job is done."""
        self._outcome.facts = facts
        self._for_driver.set()

    def fail(self, error: str) -> None:
        """The job cannot be done; the first word on it counts, whichever worker speaks."""
        self._outcome.error = self._outcome.error or error
        self._for_driver.set()

    async def look(self) -> Outcome:
        """How the job stands; its messages are handed over once."""
        await _news(self._for_driver)
        now = time.monotonic()
        # Workers wait for each other, so the group goes on as long as one of them does.
        quiet = min((now - at for at, _ in self._beats.values()), default=0.0)
        is_patient = any(patience for _, patience in self._beats.values())
        seen = replace(self._outcome, quiet_seconds=quiet, is_patient=is_patient)
        self._outcome.progress = []
        return seen

    def make_way(self) -> None:
        """Have the workers leave a checkpoint and end: a larger group is to take their place."""
        self._is_to_make_way = True

    def close(self) -> None:
        """No more jobs: the workers end."""
        self._is_closed = True
        self._for_workers.set()


async def _news(event: asyncio.Event) -> None:
    """Wait until there is some, half a second at most."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), WAIT_SECONDS)
    event.clear()
