"""The worker groups of a flow: as many as runs may train at a time, shared by all its runs."""

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from dml_core.errors import TrainingError
from tasks.environment import ray_cluster
from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.wording import Say
from tasks.workers.connection import start_ray, stop_ray
from tasks.workers.group import WORKERS, WorkerGroup

RAY = "Ray"  # name of its start in `StartTimes`


class Workers:
    """The worker groups of a flow: one per concurrent run, each started when first needed.

    Args:
        folder: folder for Ray Train's own state.
        say: receives one line on the placement, once Ray has started.
    """

    def __init__(self, scale: ScaleSpec, folder: Path, say: Say, starts: StartTimes) -> None:
        self._scale = scale
        self._folder = folder
        self._say = say
        self._starts = starts
        self._num_runs: int | None = None
        self._groups: list[WorkerGroup] = []
        self._free: list[WorkerGroup] = []  # the last is taken first: a started group is reused before another is started
        self._waiting: set[tuple[bool, int]] = set()  # jobs that wait for a group: whether they train, and their number
        self._numbers = itertools.count()
        self._change = threading.Condition()  # of the free groups and of the waiting jobs
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._closed = False

    def expect(self, num_runs: int) -> None:
        """Set the number of runs to train, from which the workers of each follow (`choose`). Ignored once Ray has started."""
        self._num_runs = num_runs

    def start_early(self, num_jobs: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Start Ray and the workers of the first jobs in the background, while the caller prepares them.

        Only on this machine: workers of a cluster wait for their turn (`dml-workers`). An error is reported by the first job, which starts
        them again. `meanwhile` is called there too, while the workers load their libraries on another core; its errors are ignored.
        """
        if ray_cluster() is None and num_jobs:
            inside = contextvars.copy_context()  # of the flow, for its log
            start = partial(inside.run, self._start_groups, num_jobs, meanwhile)
            threading.Thread(target=start, name="workers-start", daemon=True).start()

    @contextlib.contextmanager
    def turn(self, is_to_embed: bool) -> Iterator[WorkerGroup]:
        """Hold the next free group: embeddings before trainings, otherwise in the order of calls.

        Raises:
            TrainingError: Ray cannot be started, has no room for the workers, or the flow is ending.
        """
        self._open()
        group = self._take(is_to_embed)
        try:
            self._check_going_on()
            yield group
        finally:
            self._put_back(group)

    def _take(self, is_to_embed: bool) -> WorkerGroup:
        """Wait for a free group: embeddings first, so that trained runs are scored and published meanwhile, then in the order of calls."""
        with self._change:
            turn = (not is_to_embed, next(self._numbers))
            self._waiting.add(turn)
            self._change.wait_for(lambda: self._free and turn == min(self._waiting))
            self._waiting.remove(turn)
            self._change.notify_all()  # another group may be free for the next
            return self._free.pop()

    def _check_going_on(self) -> None:
        if self._closed:
            raise TrainingError("the flow is ending; no new jobs are accepted")

    def _put_back(self, *groups: WorkerGroup) -> None:
        with self._change:
            self._free.extend(groups)
            self._change.notify_all()

    def close(self) -> None:
        """End all groups and what `start_ray` started. A job in progress is abandoned; its checkpoint stays."""
        self._closed = True
        with self._lock:  # a start of Ray in progress ends first
            for group in self._groups:
                group.close()
            stop_ray()
        self._ending.set()

    def _start_groups(self, num_jobs: int, meanwhile: Callable[[], None]) -> None:
        """Start Ray and groups, and wait for `close`: Linux ends Ray's processes when the thread ends that started them."""
        with contextlib.suppress(Exception):
            self._open()
            with self._change:
                first, self._free = self._free[:num_jobs], self._free[num_jobs:]
            for group in first:
                with contextlib.suppress(Exception):  # the other groups may start
                    group.start()
                self._put_back(group)
            meanwhile()
        self._ending.wait()

    def _open(self) -> None:
        """Start Ray and create the groups that fit, on the first call."""
        with self._lock:
            self._check_going_on()
            if self._groups:
                return
            with self._starts.timed(RAY) if ray_cluster() is None else contextlib.nullcontext():
                placement = start_ray(self._scale, self._num_runs)
            self._say(f"{placement.describe(self._scale)}; starting {WORKERS}{self._starts.about(WORKERS)}")
            self._groups = [WorkerGroup(placement, self._scale, self._folder, self._say, self._starts) for _ in range(placement.num_groups)]
            self._put_back(*self._groups)
