"""What runs inside Ray: the board on which a job is put, and the training function of the worker group that does one job after another.

One worker group serves many runs: starting one costs tens of seconds (processes, imports, rendezvous), a small run costs less than that.
Rank 0 asks the board for the next job and tells the others; all of them do it; rank 0 reports. When a worker dies, Ray Train starts the
group anew, the board hands out the unfinished job again, and it goes on from its checkpoint.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from dml_core.errors import DmlError
from dml_core.training.history import Progress
from dml_core.training.parallel import rank, world_size
from tasks.locks import alone
from tasks.storage import Store, enable_s3_weights
from tasks.workers.jobs import Job, Outcome
from tasks.workers.work import WORK

POLL_SECONDS = 0.05
IDLE_SECONDS = 60.0
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


def serve(config: dict[str, Any]) -> None:
    """The training function of every worker: work through the board's jobs until it is closed."""
    enable_s3_weights()
    board = config["board"]
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(config["num_threads"])
    while (job := _next_job(board)) != STOP:
        if isinstance(job, Job):
            _do(job, device, board)


def _do(job: Job, device: torch.device, board: Any) -> None:
    """Do one job and say how it went; a fault ends this worker, and with it the group, which Ray Train then starts anew."""
    started = time.monotonic()
    try:
        local_rank = ray.train.get_context().get_local_rank()
        with _folder_to_itself(job):
            found = WORK[job.step](job, device, lambda message: board.progress.remote(job.id, message), local_rank)
    except DmlError as error:
        ray.get(board.fail.remote(job.id, f"{job.spec.title}: {error}"))
        raise
    except Exception as error:
        ray.get(board.note_fault.remote(f"{type(error).__name__}: {error}"))
        raise
    if rank() == 0:
        facts = {"device": device.type, "num_workers": world_size(), "seconds": round(time.monotonic() - started, 3), **found}
        ray.get(board.finish.remote(job.id, facts))


def _folder_to_itself(job: Job) -> AbstractContextManager[None]:
    """What rank 0 works under: workers of a flow that was killed may live for some seconds, and write where this one is to write."""
    if rank() != 0:
        return nullcontext()
    name = job.train_key if job.step == "train" else job.embed_key
    return alone(Store(job.store, Path(job.cache)).folder(".locks") / f".worker-{name.replace('/', '-')}")


def _next_job(board: Any) -> Job | str | None:
    """The same answer on every rank. Rank 0 asks; it answers None once a minute so that nobody waits longer than a collective may."""
    answer: list[Job | str | None] = [None]
    if rank() == 0:
        until = time.monotonic() + IDLE_SECONDS
        while (found := ray.get(board.next.remote())) is None and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        answer = [found]
    if world_size() > 1:
        dist.broadcast_object_list(answer, src=0)
    return answer[0]
