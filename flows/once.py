"""A step runs once, whoever asks for it: a lock by its identity, held from before its first file until its record is kept.

Who finds it held waits, without workers, and then finds the step finished; where the other was killed or failed, it goes on from what that
one left. The lock's file lies in the store, or in this machine's cache of a remote one: two hosts with nothing but S3 in common may both
run a step, and leave the same files.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from flows.kept import finished_record
from flows.services import Services
from tasks.locks import FileLock
from tasks.runs.identity import StepIdentity
from tasks.runs.made import note_made
from tasks.runs.records import StepRecord
from tasks.storage import LOCKS

POLL_SECONDS = 0.2
DOING = {"train": "training", "embed": "embedding", "evaluate": "evaluating"}
AnyRecord = TypeVar("AnyRecord", bound=StepRecord)
Slots = Callable[[Services], AbstractContextManager[None]]


class StepLock:
    """The lock of one step that was submitted.

    Args:
        step: the step's Prefect task; its result is kept under the identity.
        of: what the step is.
        title: what a person knows the run by.
        services: the flow's.
        anew: run the step, finished or not.

    Attributes:
        taken_over: whether another had finished the step by the time that its turn came.
    """

    def __init__(self, step: Any, of: StepIdentity, title: str, services: Services, anew: bool) -> None:
        self._step, self._of, self._title, self._services, self._anew = step, of, title, services, anew
        self._path = services.store.folder(LOCKS) / f".{step.name}-{of.identity}"
        self._lock = FileLock(self._path)
        self._has_said = False
        self.taken_over = False

    def once(self, work: Callable[[], AnyRecord], slots: Slots) -> AnyRecord:
        """The record that `work` returns, or that of another who did the same meanwhile.

        The lock stays held when this returns: `release` it when the record is kept.

        Args:
            work: the step; called with the lock and the slots held.
            slots: what the step takes of the machine's workers; not held while waiting for another.

        Raises:
            TrainingError: the flow is stopping.
        """
        while True:
            with slots(self._services):
                if self._lock.acquire(wait=False):
                    return self._turn(work)
            self._wait()

    def release(self, *_: object) -> None:
        """Let the next one in."""
        self._lock.release()

    def _turn(self, work: Callable[[], AnyRecord]) -> AnyRecord:
        try:
            found: Any = None if self._anew else self._finished()
            self.taken_over = found is not None
            record = found if found is not None else work()
            note_made(self._services.project.state, self._of)
            return record
        except BaseException:
            self._lock.release()
            raise

    def _finished(self) -> StepRecord | None:
        """What was damaged when the step was submitted was said then."""
        return finished_record(self._step, self._of.identity, self._services.store, self._title, warn=False)

    def _wait(self) -> None:
        """Wait until nobody has the lock; said once."""
        if not self._has_said:
            what = f"another dml ({self._lock.holder()}) is {DOING[self._step.name]} {self._title}"
            self._services.display.say(f"{what}; waiting for it")
            self._has_said = True
        probe = FileLock(self._path)
        while not probe.acquire(wait=False):
            self._services.check_going_on()
            time.sleep(POLL_SECONDS)
        probe.release()
