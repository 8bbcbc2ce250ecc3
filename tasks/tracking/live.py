"""Curves of a run while it trains."""

import logging
import time
from typing import TYPE_CHECKING

from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from dml_core.errors import TrackingError
from dml_core.training.history import Progress
from tasks.runs.specs import RunSpec

if TYPE_CHECKING:
    from tasks.tracking.tracker import Tracker

SECONDS_BETWEEN = 10.0
logger = logging.getLogger(__name__)


class LiveCurves:
    """Epoch curves of a run in training; after the server fails once, nothing more is sent.

    Epochs are sent at most every `SECONDS_BETWEEN`, all since the last time together: small networks end several per second, and each call
    takes MLflow's database some 20 ms. Epochs not sent by the end of the training are added when the run is published.

    With `MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=true` the run also has system metrics, of the machine that runs the flow.
    """

    def __init__(self, tracker: "Tracker", comparison: str, identity: str, spec: RunSpec) -> None:
        self._tracker = tracker
        self._of = (comparison, identity, spec)
        self._run_id: str | None = None
        self._system: SystemMetricsMonitor | None = None
        self._failed = False
        self._unsent: list[Progress] = []
        self._sent_at = -SECONDS_BETWEEN

    def __call__(self, progress: Progress) -> None:
        """Log the means of an ended epoch; called with every message of a run."""
        if not progress.epoch_ended or self._failed:
            return
        self._unsent.append(progress)
        try:
            if self._run_id is None:
                self._run_id = self._tracker.begin_run(*self._of)
                self._watch_system(self._run_id)
            if time.monotonic() - self._sent_at >= SECONDS_BETWEEN:
                self._tracker.log_epochs(self._run_id, {sent.epoch: sent.metrics for sent in self._unsent})
                self._unsent, self._sent_at = [], time.monotonic()
        except TrackingError as error:
            logger.warning("%s; no live curves for this run, training continues", error)
            self._failed = True
        if self._system is not None and (self._failed or progress.epoch == progress.num_epochs - 1):
            self._system.finish()  # type: ignore[no-untyped-call]

    def _watch_system(self, run_id: str) -> None:
        if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():  # type: ignore[no-untyped-call]
            self._system = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=self._tracker.uri)  # type: ignore[no-untyped-call]
            self._system.start()  # type: ignore[no-untyped-call]
