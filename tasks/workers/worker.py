"""What runs inside Ray's workers: the training function of the worker group, which does one job of the board (`board.py`) after another.

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
from dml_core.training.parallel import rank, world_size
from tasks.locks import alone
from tasks.storage import Store, enable_s3_weights
from tasks.workers.board import STOP
from tasks.workers.jobs import Job
from tasks.workers.work import WORK

POLL_SECONDS = 0.05
IDLE_SECONDS = 60.0


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
