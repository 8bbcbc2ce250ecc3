"""Run each step once across processes: a lock on its identity is held from before its first file until its record is stored.

Other processes wait without occupying workers and then find the step finished; if the holder was killed or failed, they resume from its
files. The lock's file is in the store, or in this machine's cache of a remote one: two hosts that share only S3 may both run a step. A
network that the other has replaced meanwhile, with other bits, is found after its embeddings are made (`flows.chain.embed`).
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from flows.reuse.planned import finished_record
from flows.services import Services
from tasks.locks import FileLock
from tasks.runs.finished import record_provenance
from tasks.runs.identity import StepIdentity
from tasks.runs.records import StepRecord

POLL_SECONDS = 0.2
DOING = {"train": "training", "embed": "embedding", "evaluate": "evaluating"}
logger = logging.getLogger(__name__)
AnyRecord = TypeVar("AnyRecord", bound=StepRecord)
Held = TypeVar("Held")


class StepLock:
    """The lock of one submitted step.

    Args:
        step: the step's Prefect task; its result is stored under the identity `of`.
        title: title of the run, for messages.
        is_forced: run the step even if it is finished.

    Attributes:
        of: the step.
        from_start: whether its work drops what earlier attempts left; a retry of a forced training does not, and resumes.
        taken_over: whether another process had finished the step before this one got the lock.
    """

    def __init__(self, step: Any, of: StepIdentity, title: str, services: Services, is_forced: bool) -> None:
        self._step, self._title, self._services = step, title, services
        self.of, self.is_forced = of, is_forced
        self.from_start = is_forced
        self._lock = FileLock(services.store.step_lock(step.name, of.identity))
        self.taken_over = False

    def run_once(
        self,
        work: Callable[[Held], AnyRecord],
        turn: Callable[[], AbstractContextManager[Held]],
        inputs: Sequence[StepRecord] = (),
    ) -> AnyRecord:
        """Return the record of `work`, or that of another process which did the same meanwhile.

        The lock is still held on return: `release` it when the record is stored. Prefect's page shows a step as running while it waits for
        its turn; the step's log shows the difference.

        Args:
            work: the step; called with what `turn` yields, while the lock is held too.
            turn: the step's share of the machine; not held while waiting for another process.
            inputs: records of the steps that `work` reads; a record made from other files is not accepted.

        Raises:
            TrainingError: the flow is stopping.
        """
        self._services.check_going_on()
        self._lock.release()  # if Prefect retries the step: its first attempt failed after `work`
        logger.info("%s: waiting for its turn", self._title)
        has_said = False
        while True:
            with turn() as held:
                if self._lock.acquire(wait=False):
                    return self._do(partial(work, held), inputs)
            if not has_said:
                what = f"another dml ({self._lock.holder()}) is {DOING[self._step.name]} {self._title}"
                self._services.display.say(f"{what}; waiting for it")
                has_said = True
            while not self._lock.acquire(wait=False):
                self._services.check_going_on()
                time.sleep(POLL_SECONDS)
            self._lock.release()  # a turn comes first

    def release(self, *_: object) -> None:
        """Release the lock."""
        self._lock.release()

    def _do(self, work: Callable[[], AnyRecord], inputs: Sequence[StepRecord]) -> AnyRecord:
        try:
            finished: Any = None
            if not self.is_forced:  # damage was reported when the step was submitted
                finished = finished_record(self._step.name, self.of.identity, self._services.store, self._title, inputs, warn=False)
            self.taken_over = finished is not None
            record = work() if finished is None else finished
            record_provenance(self._services.project.state, self.of)
            return record
        except BaseException:
            self._lock.release()
            raise
