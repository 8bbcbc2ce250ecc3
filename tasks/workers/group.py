"""Training and embedding on Ray: worker groups that are started once and serve every run of a flow."""

import atexit
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dml_core.errors import TrainingError
from dml_core.training.history import Progress
from tasks.processes import GO_ON, watch_children
from tasks.runs.specs import ScaleSpec
from tasks.workers.jobs import Job, Outcome
from tasks.workers.placement import Placement, choose

POLL_SECONDS = 0.25
COLLECTIVE_TIMEOUT_SECONDS = 1800
ANSWER_SECONDS = 60  # of the board; one that died is there again after some ten seconds
CLOSE_SECONDS = 30
RAY_PROCESSES = {"gcs_server": "Ray's GCS (gcs_server)", "raylet/raylet": "Ray's raylet"}
Watch = Callable[[Progress], None]
Say = Callable[[str], None]


class Workers:
    """The worker groups of a flow: as many as runs may train at the same time, each started when it is first needed.

    Args:
        scale: how many groups, how many workers in each, and on what, at most.
        folder: where Ray Train keeps its own state.
        say: told in one line what the runs train on, once Ray has started.
    """

    def __init__(self, scale: ScaleSpec, folder: Path, say: Say = lambda text: None) -> None:
        self._scale = scale
        self._folder = folder
        self._say = say
        self._groups: list[WorkerGroup] = []
        self._free: queue.LifoQueue[WorkerGroup] = queue.LifoQueue()  # a started group is taken again before another is started
        self._lock = threading.Lock()
        self._closed = False

    def run(self, job: Job, watch: Watch) -> dict[str, object]:
        """Have the next free group do a job, and return its facts (device, num_workers, seconds, attempts). Threads may call it together.

        Args:
            job: what to do.
            watch: told of every progress message.

        Raises:
            TrainingError: the job failed, or its workers cannot be started.
        """
        self._open()
        group = self._free.get()
        try:
            return group.run(job, watch)
        finally:
            self._free.put(group)

    def close(self) -> None:
        """End all groups and what `start_ray` started. A job that is being done is given up; its checkpoint stays."""
        self._closed = True
        for group in self._groups:
            group.close()
        stop_ray()

    def _open(self) -> None:
        """Start Ray and make the groups that fit, the first time."""
        with self._lock:
            if self._closed:
                raise TrainingError("the flow is ending, no job is taken up any more")
            if self._groups:
                return
            placement = start_ray(self._scale)
            self._say(f"{placement.text}; starting the workers (about 20 s)")
            self._groups = [WorkerGroup(placement, self._scale.max_failures, self._folder) for _ in range(placement.num_groups)]
            for group in self._groups:
                self._free.put(group)


class WorkerGroup:
    """The workers of one `TorchTrainer`; they do one job after another until `close`."""

    def __init__(self, placement: Placement, max_failures: int, folder: Path) -> None:
        self._placement = placement
        self._max_failures = max_failures
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._board: Any = None
        self._error: BaseException | None = None
        self._busy = False

    def run(self, job: Job, watch: Watch) -> dict[str, object]:
        """Have the workers do a job, and return its facts.

        Raises:
            TrainingError: the job failed, or the workers cannot be started.
        """
        if self._thread is None:
            self._start()
        job = replace(job, num_loader_workers=self._placement.num_loaders)
        self._busy = True
        self._ask("submit", job)
        while True:
            alive = self._thread is not None and self._thread.is_alive()
            outcome: Outcome = self._ask("look")
            for message in outcome.progress:
                watch(message)
            if outcome.job_id != job.id:
                self._ask("submit", job)
            elif outcome.error is not None:
                self._busy = False
                raise TrainingError(outcome.error)
            elif outcome.facts is not None:
                self._busy = False
                return {**outcome.facts, "attempts": outcome.attempts}
            if not alive:
                self._thread = None
                raise TrainingError(f"{job.spec.title}: Ray's workers ended: {_first_line(self._error)}")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Let the workers end where they wait for a job; `run` would start new ones. Who is at work ends with Ray."""
        if self._thread is not None and not self._busy:
            self._board.close.remote()
            self._thread.join(CLOSE_SECONDS)
        self._thread = None

    def _ask(self, call: str, *arguments: object) -> Any:
        """What the board answers.

        Raises:
            TrainingError: Ray is gone, or has not answered for a minute.
        """
        import ray

        try:
            return ray.get(getattr(self._board, call).remote(*arguments), timeout=ANSWER_SECONDS)
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise TrainingError(f"Ray does not answer ({type(error).__name__}); {GO_ON}") from error

    def _start(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from tasks.workers.board import Board

        placement = self._placement
        self._board = cast(Any, Board).remote(self._max_failures + 1)
        num_threads = max(1, (os.cpu_count() or 1) // (placement.num_workers * placement.num_groups))
        trainer = TorchTrainer(
            _serve,
            train_loop_config={"board": self._board, "num_threads": num_threads},
            scaling_config=ScalingConfig(
                num_workers=placement.num_workers, use_gpu=placement.device == "cuda", resources_per_worker=placement.resources
            ),
            torch_config=_torch_config(self._folder),
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


def _serve(config: dict[str, Any]) -> None:
    """`worker.serve`, loaded in the workers alone: Ray's controller, which gets this function too, has no use for torch's seconds."""
    from tasks.workers.worker import serve

    serve(config)


_group_number = itertools.count()


def _torch_config(folder: Path) -> Any:
    """How the workers of a group meet: at a file on this machine, at a port of rank 0 on a cluster."""
    if "RAY_ADDRESS" in os.environ:
        from ray.train.torch import TorchConfig

        return TorchConfig(timeout_s=COLLECTIVE_TIMEOUT_SECONDS)
    from tasks.workers.rendezvous import FileRendezvous

    folder.mkdir(parents=True, exist_ok=True)
    return FileRendezvous(timeout_s=COLLECTIVE_TIMEOUT_SECONDS, folder=str(folder.absolute()))


def start_ray(scale: ScaleSpec) -> Placement:
    """Connect to the cluster of `RAY_ADDRESS`, or start Ray on this machine; where the flow's runs are to train.

    A Ray that was started here is watched: when its GCS or its raylet dies the flow ends at once.

    Raises:
        TrainingError: Ray does not start or cannot be reached, or has not the device that was asked for by name.
    """
    import ray

    if not ray.is_initialized():
        _connect(os.environ.get("RAY_ADDRESS", "local"))
    return choose(scale, ray.cluster_resources(), [node["Resources"] for node in ray.nodes() if node["Alive"]])


def _connect(address: str, attempts: int = 2) -> None:
    """Ray gives a node 30 seconds to start, which a machine that is busy with other things may miss; a second attempt finds it warm."""
    import ray

    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    except Exception as error:  # Ray raises plain ones
        if attempts > 1:
            return _connect(address, attempts - 1)
        where = "Ray on this machine" if address == "local" else f"Ray at {address}"
        raise TrainingError(f"{where} did not start or does not answer: {_first_line(error)}") from error
    if address == "local":
        _watches.append(watch_children(RAY_PROCESSES))
        atexit.register(stop_ray)  # before Ray's own, which would stop what is watched
    return None


def stop_ray() -> None:
    """Disconnect, and stop what `start_ray` started. Does nothing where Ray was never used."""
    import sys

    while _watches:
        _watches.pop()()
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        sys.modules["ray"].shutdown()


_watches: list[Callable[[], None]] = []


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if error is not None and str(error).strip() else "no reason given; see Ray's logs"
