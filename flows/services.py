"""Resources shared by the steps of a flow: store, MLflow, workers, the terminal."""

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

from httpx import HTTPError
from prefect import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from dml_core.errors import ConfigError, DataError, TrainingError
from flows.backends import Backends
from tasks.data import read_dataset, update_dataset
from tasks.dvc_lock import dvc_digest
from tasks.environment import Project, prefect_server, ray_address, ray_cluster
from tasks.locks import FileLock
from tasks.runs.costs import Meter
from tasks.runs.finished import Code
from tasks.runs.identity import evaluate_modules, source_files
from tasks.runs.records import DatasetRecord
from tasks.runs.replaced_data import use_packed
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.scores.earlier_figures import EarlierFigures
from tasks.start_times import StartTimes
from tasks.wording import Say, counted
from tasks.workers.group import WorkerGroup
from tasks.workers.pool import RAY, Workers
from tasks.workers.progress import ProgressDisplay

WORKERS_LIMIT = "dml-workers"
LEASE_SECONDS = 90  # a dead flow's worker slots are released after this time; a living flow renews them
WAIT_SECONDS = 15.0  # for slots, between two looks at whether the flow is stopping; an answer that comes later than that is lost
SCORED_AT_ONCE = 2
logger = logging.getLogger(__name__)


class Services(Backends):
    """Resources shared by the steps of a flow; created once per flow and closed at its end.

    Args:
        force: run every step, done or not.
        fail_fast: start no further steps after a run fails.
        code: "keep" to reuse finished steps that other code made; outcomes list the names of the changed files.

    Raises:
        StoreError: the store cannot be written, or a newer version of the program wrote the state.
        ConfigError: the server's limit on workers is below the number a run needs.
    """

    def __init__(self, project: Project, scale: ScaleSpec, force: bool = False, fail_fast: bool = False, code: Code = "strict") -> None:
        _log_to_prefect()
        super().__init__(project)
        self.scale = scale
        self.force, self.fail_fast, self.code = force, fail_fast, code
        self.stopping = threading.Event()
        self.submitted: dict[str, Any] = {}  # steps of this flow by identity: runs that share one wait for the same step
        self.earlier_figures = EarlierFigures(project.state, self.store)
        self.scorings = threading.BoundedSemaphore(SCORED_AT_ONCE)  # scoring uses this process's memory and cores
        self.display = ProgressDisplay()
        if prefect_server() is not None:
            ensure_limit(scale.most_workers, scale.most_workers * scale.concurrent_runs, self.display.say)
        self.meter = Meter(project.state)
        self.starts = StartTimes(project.state, self.display.say)
        self.workers = Workers(scale, project.state / "ray", self.display.say, self.starts)
        self._is_announced = False  # whether the start of Ray was announced
        self._smoke_tables: set[str | None] = set()
        self.dvc_digests: dict[str, str | None] = {}  # of used datasets; `dvc.lock` may have a conflict or other data by the end of a run
        self._used: list[FileLock] = []  # of datasets

    def is_first_smoke(self, spec: RunSpec) -> bool:
        """Return whether a smoke run is the first of its table in this flow: only that is published."""
        is_first = spec.table not in self._smoke_tables
        self._smoke_tables.add(spec.table)
        return is_first

    def use_dataset(self, name: str) -> DatasetRecord:
        """Update a dataset through DVC, and return its record; until the end of the flow no other images replace it.

        Raises:
            DataError: as `update_dataset`.
        """
        update_dataset(self.project, name)
        with suppress(DataError):  # as of a conflict, in a stage of DVC
            self.dvc_digests[name] = dvc_digest(self.project, name)
        self._used.append(use_packed(self.project, name))
        return read_dataset(self.project, name)

    def check_going_on(self) -> None:
        """Raise an error if another run's failure stops the flow.

        Raises:
            TrainingError: the flow is stopping.
        """
        if self.stopping.is_set():
            raise TrainingError("not run: another run failed before it")

    def stop(self) -> None:
        """Start no further steps, and abort the workers' current ones; their checkpoints stay."""
        self.stopping.set()
        self.workers.close()

    @contextmanager
    def turn(self, is_to_embed: bool) -> Iterator[WorkerGroup]:
        """Hold a worker group of this flow, then one slot of the server's `dml-workers` limit per worker; flows on one server share them.

        The group comes first: the server grants slots in the order of requests, so that embeddings would wait behind all trainings.
        """
        with self.workers.turn(is_to_embed) as group, slots(self.scale.most_workers, self.check_going_on):
            yield group

    def start_workers_early(self, num_to_train: int, measurements: Collection[str]) -> None:
        """Start Ray and workers on this machine while datasets are prepared, if runs will train; load what these measurements need."""
        load = partial(self._load_libraries, measurements)
        if num_to_train and ray_cluster() is not None:
            threading.Thread(target=load, daemon=True).start()
        elif num_to_train:
            self._is_announced = True
            self.display.say(f"starting Ray on this machine{self.starts.about(RAY)}")
            self.workers.start_early(num_to_train, load)

    def _load_libraries(self, measurements: Collection[str]) -> None:
        """Load what scoring and publishing need: the first run need not wait for it, and edits during the training change no scores."""
        with suppress(Exception):  # the run that needs it reports it
            for module in source_files(evaluate_modules(measurements)):
                import_module(module)
            self.tracker.load()

    def announce(self, num_runs: int, num_to_train: int) -> None:
        """Print how many runs follow, how many of them train, and that Ray takes time to start."""
        self.display.plan(num_runs, num_to_train)
        if not num_to_train:
            return
        ray = "connecting to the Ray cluster" if ray_address() != "local" else f"starting Ray on this machine{self.starts.about(RAY)}"
        then = "" if self._is_announced else f"; {ray}"
        self._is_announced = True
        self.display.say(f"{num_to_train} of {counted(num_runs, 'run')} to train{then}")

    def close(self) -> None:
        """End the workers and clear the display."""
        super().close()
        with self.meter.phase("end of workers"):
            self.workers.close()
        for dataset in self._used:
            with suppress(OSError):  # of a file system that became read-only or stale: the lock ends with this process
                dataset.release(remove=True)
        self.meter.close()
        self.display.close()


@contextmanager
def slots(num_workers: int, check_going_on: Callable[[], None]) -> Iterator[None]:
    """Hold slots of the server's limit; without a server this flow is the only one.

    A server that does not answer when they are released takes them back when their lease ends; the body's result is not lost.

    Raises:
        TrainingError: the flow is stopping (`check_going_on`).
    """
    if prefect_server() is None:
        yield
        return
    held = ExitStack()
    while True:
        check_going_on()
        wanted = concurrency(
            WORKERS_LIMIT, num_workers, WAIT_SECONDS, strict=True, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False
        )
        with suppress(TimeoutError):
            held.enter_context(wanted)
            break
    try:
        yield
    finally:
        with if_server_answers(f"it takes back the slots of '{WORKERS_LIMIT}' within {LEASE_SECONDS} s"):
            held.close()


@contextmanager
def if_server_answers(otherwise: str) -> Iterator[None]:
    """Log an error of Prefect's client in the body, with its consequence: it fails no step that is done, and no flow."""
    try:
        yield
    except HTTPError as error:
        logger.warning("Prefect's server does not answer (%s): %s", type(error).__name__, otherwise)


def ensure_limit(num_workers: int, capacity: int, say: Say) -> None:
    """Create the server's limit on workers if it has none; an administrator's limit is kept, and said if it allows fewer runs at a time.

    Raises:
        ConfigError: the limit is below the number one run needs, so that no run could ever start.
    """
    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(WORKERS_LIMIT).limit
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):  # another flow creates it at the same time
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=WORKERS_LIMIT, limit=capacity))
            limit = client.read_global_concurrency_limit_by_name(WORKERS_LIMIT).limit
    remedy = f"raise it: prefect gcl update {WORKERS_LIMIT} --limit {capacity}"
    if limit < num_workers:
        raise ConfigError(f"Prefect's limit '{WORKERS_LIMIT}' is {limit}, but a run needs {num_workers} workers; {remedy}")
    if limit < capacity:
        at_once = f"at most {counted(limit // num_workers, 'run')} at a time"
        say(f"Prefect's limit '{WORKERS_LIMIT}' is {limit}: {at_once}; {remedy}, or lower scale.concurrent_runs")


def _log_to_prefect() -> None:
    """Store the project's own log lines with the flow run (Prefect listens to these loggers); the terminal shows the display instead."""
    for name in ("flows", "tasks", "dml_core"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("prefect._internal.concurrency").setLevel(logging.CRITICAL)  # an error for each wait for slots
    for handler in logging.getLogger().handlers:
        handler.setLevel(max(handler.level, logging.WARNING))
