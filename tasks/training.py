"""Training and embedding on Ray: worker groups that are started once and serve every run of a flow."""

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from dml_core.errors import TrainingError
from dml_core.training.history import Progress
from tasks.jobs import Job, Outcome
from tasks.specs import ScaleSpec

POLL_SECONDS = 0.1
COLLECTIVE_TIMEOUT_SECONDS = 1800
Watch = Callable[[Progress], None]


class Workers:
    """The worker groups of a flow: as many as runs may train at the same time, each started when it is first needed.

    Args:
        scale: how many groups, how many workers in each, and on what.
        folder: where Ray Train keeps its own state.
    """

    def __init__(self, scale: ScaleSpec, folder: Path) -> None:
        self._groups = [WorkerGroup(scale, folder) for _ in range(scale.concurrent_runs)]
        self._free: queue.LifoQueue[WorkerGroup] = queue.LifoQueue()  # a started group is taken again before another is started
        for group in self._groups:
            self._free.put(group)

    def run(self, job: Job, watch: Watch) -> dict[str, object]:
        """Have the next free group do a job, and return its facts (device, num_workers, seconds, attempts). Threads may call it together.

        Args:
            job: what to do.
            watch: told of every progress message.

        Raises:
            TrainingError: the job failed, or its workers cannot be started.
        """
        group = self._free.get()
        try:
            return group.run(job, watch)
        finally:
            self._free.put(group)

    def close(self) -> None:
        """End all groups and what `start_ray` started."""
        for group in self._groups:
            group.close()
        stop_ray()


class WorkerGroup:
    """The workers of one `TorchTrainer`; they do one job after another until `close`."""

    def __init__(self, scale: ScaleSpec, folder: Path) -> None:
        self._scale = scale
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._board: Any = None
        self._error: BaseException | None = None

    def run(self, job: Job, watch: Watch) -> dict[str, object]:
        """Have the workers do a job, and return its facts.

        Raises:
            TrainingError: the job failed, or the workers cannot be started.
        """
        if self._thread is None:
            self._start()
        import ray

        ray.get(self._board.submit.remote(job))
        while True:
            alive = self._thread is not None and self._thread.is_alive()
            outcome: Outcome = ray.get(self._board.look.remote())
            for message in outcome.progress:
                watch(message)
            if outcome.error is not None:
                raise TrainingError(outcome.error)
            if outcome.facts is not None:
                return {**outcome.facts, "attempts": outcome.attempts}
            if not alive:
                self._thread = None
                raise TrainingError(f"{job.spec.title}: Ray's workers ended: {_first_line(self._error)}")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Let the workers end; `run` would start new ones."""
        if self._thread is not None:
            self._board.close.remote()
            self._thread.join()
        self._thread = None

    def _start(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        scale = self._scale
        use_gpu = start_ray(scale)
        from tasks.ray_worker import Board, serve

        self._board = cast(Any, Board).remote(scale.max_failures + 1)
        num_threads = max(1, (os.cpu_count() or 1) // (scale.num_workers * scale.concurrent_runs))
        trainer = TorchTrainer(
            serve,
            train_loop_config={"board": self._board, "num_threads": num_threads},
            scaling_config=ScalingConfig(num_workers=scale.num_workers, use_gpu=use_gpu),
            torch_config=TorchConfig(timeout_s=COLLECTIVE_TIMEOUT_SECONDS),
            run_config=RunConfig(
                name=f"workers-{os.getpid()}-{next(_group_number)}",
                storage_path=str(self._folder.absolute()),
                # The board limits the attempts of each job; the group itself is started anew as often as it takes.
                failure_config=FailureConfig(max_failures=-1, controller_failure_limit=2),
            ),
        )
        self._thread = threading.Thread(target=self._fit, args=(trainer,), name="worker-group", daemon=True)
        self._thread.start()

    def _fit(self, trainer: Any) -> None:
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001 - kept, and raised by the job that waits
            self._error = error


_group_number = itertools.count()


def start_ray(scale: ScaleSpec) -> bool:
    """Connect to the cluster of `RAY_ADDRESS`, or start Ray on this machine; whether the workers get a GPU each.

    Raises:
        TrainingError: fewer CPUs or GPUs than the runs ask for; said at once, where Ray would wait for ever.
    """
    import ray

    if not ray.is_initialized():
        ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    resources = ray.cluster_resources()
    wanted = scale.num_workers * scale.concurrent_runs
    num_gpus = resources.get("GPU", 0)
    if scale.device == "cuda" and num_gpus < wanted:
        raise TrainingError(
            f"scale: device cuda needs {wanted} GPUs, Ray has {num_gpus:g}; lower num_workers, add nodes, or set device: auto"
        )
    use_gpu = scale.device != "cpu" and num_gpus >= wanted
    if not use_gpu and resources.get("CPU", 0) < wanted:
        raise TrainingError(
            f"scale: {wanted} workers need as many CPUs, Ray has {resources.get('CPU', 0):g}; lower num_workers or add nodes"
        )
    return use_gpu


def stop_ray() -> None:
    """Disconnect, and stop what `start_ray` started. Does nothing where Ray was never used."""
    import sys

    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        sys.modules["ray"].shutdown()


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if error is not None and str(error).strip() else "no reason given; see Ray's logs"
