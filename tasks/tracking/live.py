"""Curves of a run in MLflow while it trains."""

import logging
import time

from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from dml_core.errors import TrackingError
from dml_core.training.history import Progress
from tasks.runs.specs import RunSpec
from tasks.tracking.child_run import metric_name
from tasks.tracking.tracker import Tracker

SECONDS_BETWEEN = 10.0  # between two transmissions of a run's curves
logger = logging.getLogger(__name__)


class LiveCurves:
    """Epoch curves of a run in training, to be closed at its end; after the server fails once, nothing more is sent.

    Epochs are sent at most every `SECONDS_BETWEEN`, all since the last time together, the first of them that long after the first message:
    small networks end several per second, and a third of a short run's calls would be for curves that nobody has time to look at. Epochs
    that are not sent by the end of the training are added when the run is published.

    With `MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=true` the run also has system metrics from then on, of the machine that runs the flow.
    """

    def __init__(self, tracker: Tracker, comparison: str, identity: str, spec: RunSpec) -> None:
        self._tracker = tracker
        self._run = (comparison, identity, spec)
        self._run_id: str | None = None
        self._system: SystemMetricsMonitor | None = None
        self._failed = False
        self._unsent: dict[tuple[str, int], float] = {}  # (metric, epochs done) -> mean; an epoch that is trained again replaces the first
        self._sent_at: float | None = None  # or when the training began

    def __call__(self, progress: Progress) -> None:
        """Log the means of an ended epoch; called with every message of a run."""
        if self._sent_at is None:
            self._sent_at = time.monotonic()
        if not progress.epoch_ended or self._failed:
            return
        self._unsent |= {(f"epoch/{metric_name(name)}", progress.epoch + 1): value for name, value in progress.metrics.items()}
        if time.monotonic() - self._sent_at < SECONDS_BETWEEN:
            return
        try:
            if self._run_id is None:
                self._run_id = self._tracker.begin_run(*self._run)
                self._watch_system(self._run_id)
            self._tracker.log_epochs(self._run_id, [(name, value, epoch) for (name, epoch), value in self._unsent.items()])
            self._unsent, self._sent_at = {}, time.monotonic()
        except TrackingError as error:
            logger.warning("%s; no live curves for this run, training continues", error)
            self._failed = True
            self.close()

    def close(self) -> None:
        """End the logging of system metrics, if there is any: MLflow's thread would log those of other runs to one that failed."""
        if self._system is not None:
            self._system.finish()  # type: ignore[no-untyped-call]
            self._system = None

    def _watch_system(self, run_id: str) -> None:
        if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():  # type: ignore[no-untyped-call]
            self._system = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=self._tracker.uri)  # type: ignore[no-untyped-call]
            self._system.start()  # type: ignore[no-untyped-call]
