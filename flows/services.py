"""What the steps of a flow work with: workers, store, MLflow, the terminal; made once a flow and closed at its end."""

import logging
import os
import threading
from typing import Any

from prefect import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.settings import PREFECT_API_URL

from dml_core.errors import ConfigError, TrainingError
from tasks.environment import Project, git_tags
from tasks.locks import running
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.sealed import check_formats
from tasks.storage import LOCKS, Store
from tasks.tracking.tracker import Tracker
from tasks.workers.group import Workers
from tasks.workers.progress import ProgressDisplay

WORKERS_LIMIT = "dml-workers"
SCORED_AT_ONCE = 2


class Services:
    """What the steps of a flow work with; made once a flow, closed at its end.

    Raises:
        StoreError: the store cannot be written, or a newer version of the program wrote the state.
        ConfigError: the server's limit on workers is below what a run takes.
    """

    def __init__(self, project: Project, scale: ScaleSpec) -> None:
        _log_to_prefect()
        self.project = project
        self.scale = scale
        self.stopping = threading.Event()
        self.submitted: dict[str, Any] = {}  # steps of this flow by identity: runs that have one in common wait for the same
        self.turns = threading.BoundedSemaphore(scale.concurrent_runs)
        self.scorings = threading.BoundedSemaphore(SCORED_AT_ONCE)
        self.store = Store(project.store, project.state / "cache")
        self.store.check_writable()
        check_formats(project.state)
        self._running = running(self.store.folder(LOCKS))
        if PREFECT_API_URL.value():
            ensure_limit(scale.most_workers, scale.most_workers * scale.concurrent_runs)
        self.tracker = Tracker(project.tracking_uri, project.state, self.store)
        self.display = ProgressDisplay()
        self.workers = Workers(scale, project.state / "ray", say=self.display.say)
        self.tags = git_tags(project)
        self.is_announced = False  # that Ray starts

    def begin(self, spec: RunSpec, doing: str) -> None:
        """Called by every step of a run before it does anything.

        Raises:
            TrainingError: the flow is stopping because another run failed.
        """
        self.check_going_on()
        if doing != "training":  # its own messages say more
            self.display.step(spec.title, doing)

    def check_going_on(self) -> None:
        """Go on only where no other run's failure stops the flow.

        Raises:
            TrainingError: it does.
        """
        if self.stopping.is_set():
            raise TrainingError("not run: another run failed before it")

    def stop(self) -> None:
        """Begin no further step, and give up what the workers are doing; its checkpoints stay."""
        self.stopping.set()
        self.workers.close()

    def announce(self, num_runs: int, num_to_train: int) -> None:
        """Say what is to come: how many runs, how many of them train, and that Ray takes its time."""
        self.display.plan(num_runs, num_to_train)
        if num_to_train and self.is_announced:
            self.display.say(f"{num_to_train} of {num_runs} {'run' if num_runs == 1 else 'runs'} to train")
        elif num_to_train:
            self.is_announced = True
            where = "connecting to the Ray cluster" if os.environ.get("RAY_ADDRESS") else "starting Ray on this machine (about 25 s)"
            self.display.say(f"{num_to_train} of {num_runs} {'run' if num_runs == 1 else 'runs'} to train; {where}")

    def close(self) -> None:
        """End the workers and clear the display."""
        self._running.release(remove=True)
        self.workers.close()
        self.display.close()


def ensure_limit(num_workers: int, capacity: int) -> None:
    """Create the server's limit on workers where it has none; one that an administrator set is respected.

    Raises:
        ConfigError: the limit is below what one run takes, so that no run could ever start.
    """
    with get_client(sync_client=True) as client:
        limits = {limit.name: limit.limit for limit in client.read_global_concurrency_limits(limit=200)}
        if WORKERS_LIMIT not in limits:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=WORKERS_LIMIT, limit=capacity))
        elif limits[WORKERS_LIMIT] < num_workers:
            raise ConfigError(
                f"Prefect's limit '{WORKERS_LIMIT}' is {limits[WORKERS_LIMIT]}, a run takes {num_workers} workers; "
                f"raise it: prefect gcl update {WORKERS_LIMIT} --limit {capacity}"
            )


def _log_to_prefect() -> None:
    """Have the project's own log lines kept with the flow run (Prefect listens to these loggers); the terminal has the display instead."""
    for name in ("flows", "tasks", "dml_core"):
        logging.getLogger(name).setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setLevel(max(handler.level, logging.WARNING))
