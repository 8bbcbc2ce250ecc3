"""The board on which a flow puts the jobs of one worker group, an actor of Ray's. It starts at once: nothing here loads torch."""

import ray

from dml_core.training.history import Progress
from tasks.workers.jobs import Job, Outcome

STOP = "stop"


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Board:
    """The job of one worker group: set by the driver, taken up by the workers at most `max_attempts` times, and how it stands.

    When its process dies Ray starts it anew, empty; the workers go on with what they do, and the driver puts the job up again.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._job: Job | None = None
        self._outcome = Outcome()
        self._fault = "no reason given"
        self._closed = False

    def submit(self, job: Job) -> None:
        """Set the next job; the last one is over."""
        self._job, self._outcome, self._fault = job, Outcome(job_id=job.id), "a worker process died"

    def next(self) -> Job | str | None:
        """The job, also when it was taken up before and not finished; None while there is none; `STOP` when closed."""
        if self._job and self._outcome.attempts >= self._max_attempts:
            self.fail(self._job.id, f"{self._job.spec.title}: given up after {self._outcome.attempts} attempts; the last: {self._fault}")
        if self._job is None:
            return STOP if self._closed else None
        self._outcome.attempts += 1
        return self._job

    def progress(self, job_id: str, message: Progress) -> None:
        """Keep a message for the driver."""
        self._outcome.progress.append(message)

    def note_fault(self, fault: str) -> None:
        """What stopped the present attempt."""
        self._fault = fault

    def finish(self, job_id: str, facts: dict[str, object]) -> None:
        """The job is done."""
        self._outcome.facts, self._outcome.job_id, self._job = facts, job_id, None

    def fail(self, job_id: str, error: str) -> None:
        """The job cannot be done; the first word on it counts, whichever worker speaks."""
        if self._job is not None and self._job.id == job_id:
            self._outcome.error, self._job = error, None

    def look(self) -> Outcome:
        """How the job stands; its messages are handed over once."""
        seen = self._outcome
        self._outcome = Outcome(seen.facts, seen.error, [], seen.attempts, seen.job_id)
        return seen

    def close(self) -> None:
        """No more jobs: the workers end."""
        self._closed = True
