"""A worker group: processes of Ray Train that start once and do one job after another, replaced if they fail."""

import contextlib
import contextvars
import itertools
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from dml_core.errors import DmlError, TrainingError
from dml_core.training.history import Progress
from tasks.environment import ray_cluster
from tasks.processes import go_on
from tasks.runs.costs import Cost
from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.wording import Say, counted
from tasks.workers.connection import is_one_machine, node_resources, reason_of
from tasks.workers.jobs import Faults, InfrastructureError, Job, JobState, class_of_end
from tasks.workers.placement import Placement, choose
from tasks.workers.usage import of_workers

POLL_SECONDS = 0.25
START_SECONDS = 300
PATIENT_SECONDS = 1800  # of work that may take long without a beat, and of an operation of all workers, at least
ANSWER_SECONDS = 60
CLOSE_SECONDS = 30
END_SECONDS = 15.0
STARTING_SECONDS = 120.0  # to end a group that is starting: its controller can be killed only once it runs, a minute on busy cores
FREE_SECONDS, ROOM_SECONDS = 15.0, 10.0
IDLE_SECONDS = 60.0
RESTART_SECONDS = 1800.0  # that a cluster has to bring back a node which the group needs
WORKERS, TIMED = "the workers", "workers-timed"  # names of their start in `StartTimes`, and of the thread that measures it
Watch = Callable[[Progress], None]
Spent = Callable[[int, Cost], None]  # number of the attempt, what its workers have used so far


class _GroupEndedError(Exception):
    """Raised if a worker group ended before its job was done."""


class _MadeWayError(_GroupEndedError):
    """Raised if it ended on request, after it had saved a checkpoint."""


class _NoRoomError(_GroupEndedError):
    """Raised if it did not start because what it needs of the cluster is in use."""


class WorkerGroup:
    """Workers that do one job after another until `close`: one fit of Ray Train after another.

    Ray never restarts workers automatically. Whatever ends a group (the death of a worker or of the board, a hang, missing resources),
    `run` ends the rest of it and starts another, `scale.max_failures` times per job as `Faults` counts, so that all restarts are limited in
    one place. On a cluster, which others may use, a job waits for room without a limit, and workers without a job end after a minute.
    """

    def __init__(self, placement: Placement, scale: ScaleSpec, folder: Path, say: Say, starts: StartTimes) -> None:
        self._placement = placement
        self._scale, self._patience = scale, max(PATIENT_SECONDS, int(60 * scale.hang_minutes))
        self._folder = folder
        self._say = say
        self._starts = starts
        self._thread: threading.Thread | None = None
        self._board: Any = None
        self._held: tuple[Any, Any] | None = None  # the group's controller and placement group, once its workers have started
        self._error: BaseException | None = None
        self._num_workers = 0
        self._was_large_enough = -RESTART_SECONDS
        self._threads: list[threading.Thread] = []  # all that wait for Ray
        self._idle = threading.Event()
        self._idle.set()
        self._closed = False
        self._lock = threading.Lock()  # of starts and of the end

    def start(self) -> None:
        """Start the workers, which wait for a job, unless they run; a group that is closed raises _GroupEndedError."""
        if self._thread is not None and self._thread.is_alive():
            return
        with self._lock:
            if self._closed:
                raise _GroupEndedError("the flow is ending")
            self._start_fit()

    def run(self, job: Job, watch: Watch, spent: Spent = lambda attempt, cost: None) -> dict[str, object]:
        """Have the workers do a job, and return its facts: device, num_workers, num_sharing, seconds, attempts.

        `watch` receives every progress message, `spent` about twice a second what the workers have used.

        Raises:
            DmlError: the job failed, or `scale.max_failures` were exceeded; its class is that of `InfrastructureError`'s rule.
        """
        self._idle.clear()
        try:
            return self._run(job, watch, spent)
        finally:
            self._idle.set()

    def close(self) -> None:
        """End the group, and wait until no thread waits for Ray: its disconnection frees what they use, and the process would crash."""
        with self._lock:
            self._closed = True
        if self._thread is not None and ray_cluster() is not None and self._idle.is_set():  # its workers wait for a job
            with contextlib.suppress(Exception):  # if the board is gone, its workers end too
                self._board.close.remote()
            self._thread.join(CLOSE_SECONDS)
        patience = STARTING_SECONDS if self._is_starting() else END_SECONDS
        self._kill(patience)
        for thread in self._threads:
            thread.join(patience)
        self._idle.wait(END_SECONDS)

    def _run(self, job: Job, watch: Watch, spent: Spent) -> dict[str, object]:
        num_attempts, has_waited = 1, False
        faults = Faults(watch, 60 * (self._scale.checkpoint_every_minutes or 10))
        while True:
            spent(num_attempts, Cost())
            try:
                facts = self._attempt(job, faults.watch, partial(spent, num_attempts))
            except _GroupEndedError as ended:
                self._end()
                if isinstance(ended, _NoRoomError) and not self._closed:
                    if not has_waited:
                        self._say(f"{job.spec.title}: {ended}; waiting for room")
                        has_waited = True
                    self._wait_for_room()
                    continue
                num_attempts += 1
                faults.attempt_ended(is_fault=not isinstance(ended, _MadeWayError))
                if self._closed:
                    raise TrainingError("the flow is ending; the job was stopped, and its checkpoint is kept") from None
                if faults.number > self._scale.max_failures:
                    times = counted(faults.number, "attempt")
                    raise class_of_end(ended)(f"{job.spec.title}: given up after {times}; the last: {ended}") from None
                self._say(f"{job.spec.title}: {ended}; retrying with new workers{self._starts.about(WORKERS)}")
            except DmlError:
                self._end()
                raise
            else:
                return {**facts, "num_sharing": self._placement.num_sharing, "attempts": num_attempts}

    def _attempt(self, job: Job, watch: Watch, spent: Callable[[Cost], None]) -> dict[str, object]:
        """Have one group do the job.

        Raises:
            DmlError: the job cannot be done.
            _GroupEndedError: the group has ended, or has to be ended.
        """
        self.start()
        while not self._ask("submit", replace(job, num_loader_workers=self._placement.num_loaders)):  # idle workers have just ended
            self._end()
            self.start()
        submitted = looked_for_room = time.monotonic()
        while True:
            is_alive = self._thread is not None and self._thread.is_alive()
            state: JobState = self._ask("look")
            for message in state.progress:
                watch(message)
            if state.used:
                spent(of_workers(state.used))
            if state.error is not None:
                raise state.error
            if state.facts is not None:
                return state.facts
            if not is_alive:
                if self._found_no_room():
                    raise _NoRoomError("the cluster's resources are in use (by this flow's runs or by other work), or a node restarts")
                ended = _MadeWayError if state.has_made_way else _GroupEndedError
                raise ended(state.fault or f"Ray's workers ended: {_why(self._error)}") from state.fault
            if state.is_taken and self._held is None:
                self._held = self._ask("held")
            now = time.monotonic()
            if state.is_taken:
                self._was_large_enough = now
            if not state.is_taken and now - submitted > START_SECONDS:
                raise _GroupEndedError(f"the workers did not start within {START_SECONDS // 60} minutes")
            if state.quiet_seconds > (self._patience if state.is_patient else 60 * self._scale.hang_minutes):
                limit = "scale.hang_minutes, at least 30 in a long operation" if state.is_patient else "scale.hang_minutes"
                raise _GroupEndedError(f"no worker has made progress for {state.quiet_seconds:.0f} s ({limit})")
            if self._scale.is_elastic and job.step == "train" and state.is_taken and now - looked_for_room > ROOM_SECONDS:
                looked_for_room = now
                self._make_way_if_there_is_room(job)

    def _ask(self, call: str, *arguments: object) -> Any:
        """Call a method of the board and return its answer.

        Raises:
            _GroupEndedError: the board is gone.
            InfrastructureError: Ray is gone, or has not answered for a minute.
        """
        import ray

        try:
            return ray.get(getattr(self._board, call).remote(*arguments), timeout=ANSWER_SECONDS)
        except ray.exceptions.RayActorError as error:
            raise _GroupEndedError(f"the process that hands out jobs (ray::Board) died ({type(error).__name__})") from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise InfrastructureError(f"Ray does not answer ({type(error).__name__}); {go_on()}") from error

    def _start_fit(self) -> None:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from tasks.workers.board import Board
        from tasks.workers.rendezvous import LocalTrainer, Rendezvous, Trainer

        # Ray detects a process that does not answer at all, whatever the other workers do.
        os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(60 * self._scale.hang_minutes)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._held = None
        self._board = cast(Any, Board).options(scheduling_strategy=here).remote()
        self._num_workers = self._fitting_size()
        self._is_large_enough()  # which is remembered while a node restarts
        folder = self._folder.absolute()
        on_a_cluster = ray_cluster() is not None
        meeting_file = folder / f"rendezvous-{uuid.uuid4()}"
        trainer = (Trainer if on_a_cluster else LocalTrainer)(
            _serve,
            train_loop_config={
                "board": self._board,
                "num_threads": self._num_threads(),
                "gpu_share": self._placement.resources.get("GPU", 0.0),
                "on_a_cluster": on_a_cluster,
                "idle_seconds": IDLE_SECONDS,
            },
            scaling_config=ScalingConfig(
                num_workers=self._num_workers,
                use_gpu=self._placement.device == "cuda",
                resources_per_worker=self._placement.resources,
                placement_strategy="SPREAD" if self._placement.device == "cpu" else "PACK",  # each of the nodes has cores for its threads
            ),
            backend_config=Rendezvous(self._board, meeting_file if is_one_machine() else None, self._patience),
            run_config=RunConfig(
                name=f"workers-{os.getpid()}-{next(_group_number)}",
                storage_path=str(folder),
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
            ),
        )
        self._error = None
        self._thread = threading.Thread(target=self._fit, args=(trainer, meeting_file), name="worker-group", daemon=True)
        inside = contextvars.copy_context()  # of the flow, for its log
        timed = threading.Thread(target=inside.run, args=(self._time_start, self._board), name=TIMED, daemon=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [self._thread, timed]
        for thread in (self._thread, timed):
            thread.start()

    def _time_start(self, board: Any) -> None:
        """Measure the start until the workers ask for their first job."""
        import ray

        with contextlib.suppress(Exception), self._starts.timed(WORKERS):  # an error ends the group, which `run` reports
            ray.get(board.ready.remote())

    def _num_threads(self) -> int:
        """Return the threads of a worker: its share of all cores, and no more than a machine has."""
        import ray

        cores = Counter[str]()  # by machine
        for node in ray.nodes():
            cores[node["NodeManagerAddress"]] += int(node["Resources"].get("CPU", 0)) if node["Alive"] else 0
        return max(1, min(cores.total() // (self._num_workers * self._placement.num_groups), max(cores.values())))

    def _fit(self, trainer: Any, meeting_file: Path) -> None:
        try:
            trainer.fit()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - stored, and reported by the job that waits; Ray's end exits its callers
            self._error = error
        finally:  # not before: NCCL's workers meet there again at their first exchange
            meeting_file.unlink(missing_ok=True)

    def _end(self) -> None:
        """End the rest of the group, including stopped processes, so that its resources are free; if the flow ends, `close` does it."""
        import ray

        held, thread = self._held, self._thread
        if thread is None or self._closed:
            return
        if held is not None and thread.is_alive():
            with contextlib.suppress(Exception):  # its controller may be gone
                ray.get(held[0].abort.remote(), timeout=END_SECONDS)
        self._kill(END_SECONDS)
        thread.join(END_SECONDS)
        self._board = self._held = self._thread = None

    def _is_starting(self) -> bool:
        """Return whether the workers have not yet asked for a job, for which the thread that measures their start waits."""
        return any(thread.name == TIMED and thread.is_alive() for thread in self._threads)

    def _kill(self, patience: float) -> None:
        """Kill the group's controller, with which its workers end, and the board; threads that wait for them receive an error.

        A controller that has not started yet is waited for, `patience` seconds at most.
        """
        import ray

        board, thread, until = self._board, self._thread, time.monotonic() + patience
        while thread is not None and time.monotonic() < until:
            with contextlib.suppress(Exception):  # what has ended needs no end
                held = self._held or ray.get(board.held.remote(), timeout=END_SECONDS)
                if held is not None:
                    controller, placement_group = held
                    ray.kill(controller)
                    if placement_group is not None:  # a controller that died alone has left it
                        ray.util.remove_placement_group(placement_group)
                    break
            if not thread.is_alive():
                break
            time.sleep(POLL_SECONDS / 5)  # the controller is starting
        if board is not None:  # without a connection Ray's calls would start a new Ray
            with contextlib.suppress(Exception):
                ray.kill(board)

    # ------------------------------------------------------------ workers that come and go

    def _wait_for_room(self) -> None:
        """Wait until the cluster has room, while it is large enough and the group not closed. An autoscaler sees the request."""
        from ray.util import placement_group, remove_placement_group

        fewest = self._scale.fewest_workers if self._scale.is_elastic else self._num_workers
        request = placement_group([self._placement.resources] * fewest)
        try:
            while not self._closed and self._is_large_enough() and not request.wait(timeout_seconds=1):
                pass
        finally:
            remove_placement_group(request)

    def _found_no_room(self) -> bool:
        """Return whether the group ended because what it needs of a cluster that is large enough for it is in use."""
        from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

        is_timeout = isinstance(getattr(self._error, "controller_failure", None), WorkerGroupStartupTimeoutError)
        return is_timeout and ray_cluster() is not None and self._is_large_enough()

    def _is_large_enough(self) -> bool:
        """Return whether nodes have places for the group, of an elastic run for its fewest workers, or had within half an hour."""
        now = time.monotonic()
        if self._num_workers <= self._placement.num_places(node_resources()):
            self._was_large_enough = now
            return True
        is_smallest = not self._scale.is_elastic or self._num_workers <= self._scale.fewest_workers
        return is_smallest and now - self._was_large_enough < RESTART_SECONDS

    def _make_way_if_there_is_room(self, job: Job) -> None:
        """Ask the group to end after a checkpoint if a larger one could do its job."""
        fitted = self._fitted()
        more = fitted.num_workers - self._num_workers
        if 0 < more <= fitted.num_places(node_resources(is_free=True)):
            self._say(f"{job.spec.title}: there is room for {counted(more, 'more worker')}")
            self._ask("make_way")

    def _fitting_size(self) -> int:
        """Return the number of workers of a group that starts now; an elastic run is placed again, with as many as fit."""
        if not self._scale.is_elastic:
            return self._placement.num_workers
        until = time.monotonic() + FREE_SECONDS  # the resources of a group that just ended are free in a moment
        while True:
            self._placement = self._fitted()
            num_free = self._placement.num_places(node_resources(is_free=True))
            if num_free >= self._placement.num_workers or time.monotonic() > until:
                return max(self._scale.fewest_workers, min(self._placement.num_workers, num_free))
            time.sleep(POLL_SECONDS)

    def _fitted(self) -> Placement:
        """Return the placement of an elastic run on the current machines and the same kind of device, with the flow's other groups."""
        nodes, last = node_resources(), self._placement
        flow = self._scale.model_copy(update={"concurrent_runs": last.num_groups, "device": last.device})
        try:
            return replace(choose(flow, nodes), num_groups=last.num_groups)
        except TrainingError:  # no resources at the moment
            return replace(last, num_workers=self._scale.fewest_workers)


def _serve(config: dict[str, Any]) -> None:
    """Call `worker.serve`, imported only in the workers: Ray's controller, which also receives this function, need not load torch."""
    from tasks.workers.worker import serve

    serve(config)


_group_number = itertools.count()


def _why(error: BaseException | None) -> str:
    """Return the reason for a failed fit, as one line."""
    from ray.train import TrainingFailedError

    failures = getattr(error, "worker_failures", None) or {}
    first = next(iter(failures.values()), None) or getattr(error, "controller_failure", None)
    first = getattr(first, "health_check_failure", first)  # such as Ray's OutOfMemoryError
    if isinstance(error, TrainingFailedError) and first is not None:
        return f"{type(first).__name__}: {reason_of(first)}"
    return reason_of(error)
