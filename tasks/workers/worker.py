"""Code that runs inside Ray's workers: the training function of the worker group, which does the board's jobs (`board.py`) one by one.

One worker group serves many runs: starting one takes tens of seconds (processes, imports, rendezvous), more than a small run. Rank 0 asks
the board for the next job and broadcasts it; all ranks do it; rank 0 reports. If a worker dies the group ends, and the driver starts
another with the unfinished job, which resumes from its checkpoint.
"""

import os
import re
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from dml_core.deterministic import deterministic_algorithms, fastest_convolutions
from dml_core.errors import DataError, DmlError, StoreError, TrainingError, first_line
from dml_core.training import pulse
from dml_core.training.checkpoints.writing import InterruptedRunError
from dml_core.training.parallel.workers import rank, world_size
from tasks.locks import alone
from tasks.runs.identity import CHOOSING_MODULES, STEP_MODULES, source_files
from tasks.runs.surroundings import SURROUNDINGS, surroundings
from tasks.storage import Store, enable_s3_weights
from tasks.workers import stopping
from tasks.workers.board import STOP
from tasks.workers.jobs import InfrastructureError, Job, LostWorkersError, check_code
from tasks.workers.usage import WorkerMeter, return_freed_memory
from tasks.workers.work import WORK

BEAT_SECONDS = 1.0
RETURN_SECONDS = 20.0  # between returns of freed memory, which take 0.05 s with 1 GB
OUTSIDE = re.compile(r"\[Errno \d+\]|by peer")  # in the text of another worker's OSError, and of an exchange with a worker that died
LESS_MEMORY = "lower sampler.batch_size or scale.runs_per_gpu, or set embed_at_once"  # for a GPU whose memory is too small


def serve(config: dict[str, Any]) -> None:
    """Work through the board's jobs until it is closed; the training function of every worker."""
    enable_s3_weights()
    os.environ.setdefault("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")  # a cluster's node has its own environment
    source_files((*STEP_MODULES["train"], *STEP_MODULES["embed"], *CHOOSING_MODULES))  # as they were imported, for `check_code`
    board = config["board"]
    device = ray.train.torch.get_device()
    torch.set_num_threads(config["num_threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    heart = _Heart(board, config["on_a_cluster"])
    pulse.listen(heart.beat)
    while (job := _next_job(board, config["idle_seconds"], config["on_a_cluster"])) != STOP:
        if isinstance(job, Job):
            heart.meter = WorkerMeter(_gpu(device), config["gpu_share"])
            _do(job, device, board, heart)


class _Heart:
    """Sends a worker's heartbeats to the board, about once a second, and learns whether the group should stop. Returns freed memory."""

    def __init__(self, board: Any, on_a_cluster: bool) -> None:
        self._board = board
        self.on_a_cluster = on_a_cluster
        self._sent = -BEAT_SECONDS
        self._returned = time.monotonic()
        self._patience = False
        self._answer: Any = None
        self.is_to_make_way = False
        self.meter: WorkerMeter | None = None  # of the current job

    def beat(self, patience: bool) -> None:
        now = time.monotonic()
        if now - self._sent < BEAT_SECONDS and patience == self._patience:
            return
        self._sent, self._patience = now, patience
        if now - self._returned > RETURN_SECONDS:
            return_freed_memory()
            self._returned = now
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            self.is_to_make_way |= ray.get(self._answer)  # raises if the board is gone, and its group with it
        self._answer = self._board.beat.remote(rank(), patience, None if self.meter is None else self.meter.cost())

    def end_job(self) -> None:
        """Report what this worker has used for its job."""
        if self.meter is not None:
            ray.get(self._board.beat.remote(rank(), self._patience, self.meter.cost()))
            self.meter = None

    def stop_wanted(self) -> bool:
        """Return whether this worker was asked to stop: by SIGTERM, by the driver, or because its machine is preempted."""
        is_preempted = self.on_a_cluster and ray.train.get_preemption_info() is not None  # all workers call this equally often
        return is_preempted or stopping.has_come() or self.is_to_make_way


def _do(job: Job, device: torch.device, board: Any, heart: _Heart) -> None:
    """Do one job and report its result; a fault ends this worker, and with it the group."""
    started = time.monotonic()
    try:
        check_code(job.sources, getattr(job, "packages", {}))  # of a flow that started before an update, it has none
        local_rank = ray.train.get_context().get_local_rank()
        with _folder_to_itself(job), deterministic_algorithms() if job.scale.deterministic else fastest_convolutions():
            step_facts = WORK[job.step](job, device, board.progress.remote, local_rank, heart.stop_wanted)
            if torch.are_deterministic_algorithms_enabled():
                step_facts["deterministic"] = True
            if device.type == "cuda" and torch.backends.cudnn.benchmark:
                step_facts["cudnn_benchmark"] = True
    except InterruptedRunError:
        ray.get(board.end.remote(has_made_way=True))
        raise
    except DmlError as error:
        kind = next((kind for kind in (InfrastructureError, DataError, StoreError) if isinstance(error, kind)), TrainingError)
        ray.get(board.end.remote(error=kind(f"{job.spec.title}: {error}")))
        raise
    except Exception as error:
        remedy = f"; {LESS_MEMORY}" if isinstance(error, torch.OutOfMemoryError) else ""
        is_outside = isinstance(error, OSError | dist.DistError) or OUTSIDE.search(str(error))
        fault = (LostWorkersError if is_outside else TrainingError)(f"{type(error).__name__}: {first_line(error)}{remedy}")
        ray.get(board.end.remote(fault=fault))
        raise
    seconds = round(time.monotonic() - started, 3)
    heart.end_job()
    if rank() == 0:
        facts = {"device": device.type, "num_workers": world_size(), "seconds": seconds, **step_facts}
        if job.step == "train" and heart.on_a_cluster:  # whose driver may be another kind of machine
            facts[SURROUNDINGS] = surroundings(device.type, torch.get_num_threads())
        ray.get(board.end.remote(facts=facts))


def _gpu(device: torch.device) -> str | None:
    """Return the UUID of a worker's GPU; None on a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def _folder_to_itself(job: Job) -> AbstractContextManager[None]:
    """Return the lock rank 0 works under: workers of a killed flow may live on for some seconds, and write to the same folder."""
    if rank() != 0:
        return nullcontext()
    name = job.train_key if job.step == "train" else job.embed_key
    return alone(Store(job.store, Path(job.cache)).locks / f".worker-{name.replace('/', '-')}")


def _next_job(board: Any, idle_seconds: float, on_a_cluster: bool) -> Job | str | None:
    """Return the same answer on every rank: rank 0 asks for so long, within the timeout of collectives.

    If there is no job the answer is None, or `STOP` on a cluster, where others may wait for what idle workers have.
    """
    answer: list[Job | str | None] = [None]
    if rank() == 0:
        until = time.monotonic() + idle_seconds
        while (job := ray.get(board.next.remote())) is None and time.monotonic() < until:
            pass  # the board answers when there is a job, or after a while
        if job is None and on_a_cluster:
            job = ray.get(board.close_if_idle.remote())
        answer = [job]
    if world_size() > 1:
        dist.broadcast_object_list(answer, src=0)
    return answer[0]
