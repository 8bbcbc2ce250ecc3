"""MLflow: one parent run a comparison, one child a run. The only module that knows it (with the packaged model that it logs).

Publishing is idempotent: a run is found again by its identity, and only what it lacks is added. A report that cannot be delivered is kept
in the outbox, `state/outbox/`, and delivered by `dml sync`; training never waits for a server.
"""

import json
import logging
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, Schema, TensorSpec

import dml_core
from dml_core.config import flatten, parse
from dml_core.errors import TrackingError
from dml_core.training.checkpoint import load_checkpoint
from dml_core.training.config import TrainingConfig
from dml_core.training.history import Progress, read_history
from tasks.records import RunReport
from tasks.specs import RunSpec
from tasks.storage import Store

EXPERIMENT = "dml-repro"
PARENT_TAG, IDENTITY_TAG, CURRENT_TAG, PUBLISHED_TAG, COMPARISON_TAG = (
    "mlflow.parentRunId",
    "dml.identity",
    "dml.current",
    "dml.published",
    "dml.comparison",
)
MAX_METRICS_PER_BATCH = 1000
MODEL_REQUIREMENTS = ("mlflow", "torch", "torchvision", "numpy", "pandas", "pydantic", "pyyaml", "pyarrow", "pillow")
logger = logging.getLogger(__name__)


class Tracker:
    """Publishing to one tracking server, with the outbox for when it is away.

    Args:
        uri: MLflow's tracking address.
        state: the project's state folder; a local database and its artifacts live there.
        store: where the published files are.
    """

    def __init__(self, uri: str, state: Path, store: Store) -> None:
        self.uri = uri
        self.outbox = state / "outbox"
        self._artifacts = state / "mlartifacts"
        self._store = store
        self._client = MlflowClient(uri)
        self._lock = threading.Lock()

    def publish(self, report: RunReport) -> str | None:
        """Deliver a report, or keep it in the outbox; the MLflow run's id, or None where it was kept."""
        kept = self.outbox / f"{report.identity}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(report.model_dump_json(indent=1))
        try:
            run_id = self._deliver(report)
        except TrackingError as error:
            logger.warning("%s; the record is kept, deliver it later with `dml sync`", error)
            return None
        kept.unlink()
        return run_id

    def sync(self) -> int:
        """Deliver everything in the outbox; the number of reports delivered.

        Raises:
            TrackingError: the server does not take them; what was not delivered stays.
        """
        num_delivered = 0
        for path in sorted(self.outbox.glob("*.json")):
            self._deliver(RunReport.model_validate_json(path.read_text()))
            path.unlink()
            num_delivered += 1
        return num_delivered

    def live(self, comparison: str, identity: str, spec: RunSpec) -> "LiveCurves":
        """Curves of a run that is being trained, under the run that `publish` will complete."""
        return LiveCurves(self, comparison, identity, run_title(spec.variant, spec.seed))

    def comparison_table(self, comparison: str) -> pd.DataFrame:
        """The comparison's current runs: columns variant, seed, run_id and every metric.

        Raises:
            TrackingError: the server cannot be reached, or has no such comparison.
        """
        runs = self._current_runs(comparison)
        if not runs:
            raise TrackingError(f"MLflow at {self.uri} has no runs of '{comparison}'; run dml reproduce first")
        rows = [
            {"variant": r.data.params["variant"], "seed": int(r.data.params["seed"]), "run_id": r.info.run_id, **r.data.metrics}
            for r in runs
        ]
        return pd.DataFrame(rows).sort_values(["variant", "seed"], ignore_index=True)

    def published(self, comparison: str) -> frozenset[str]:
        """Identities of the comparison's current runs that MLflow has whole; none where it is away."""
        try:
            runs = self._current_runs(comparison)
        except TrackingError:
            return frozenset()  # publishing will try again, and say so
        return frozenset(run.data.tags[IDENTITY_TAG] for run in runs if run.data.tags.get(PUBLISHED_TAG) == "true")

    def comparisons(self) -> list[str]:
        """Titles of the comparisons that the server knows."""
        with _told_as_tracking_error(self.uri):
            return sorted({run.data.tags[COMPARISON_TAG] for run in self._search(f"tags.`{COMPARISON_TAG}` LIKE '%'")})

    # ------------------------------------------------------------ delivery

    def _deliver(self, report: RunReport) -> str:
        with self._lock, _told_as_tracking_error(self.uri):
            run_id = self._find_or_create_run(report.comparison, report.identity, run_title(report.variant, report.seed))
            if self._client.get_run(run_id).data.tags.get(PUBLISHED_TAG) != "true":
                self._log_facts(run_id, report)
                self._log_curves(run_id, report)
                self._log_files(run_id, report)
                self._log_model(run_id, report)
                self._client.set_tag(run_id, PUBLISHED_TAG, "true")
                self._client.set_terminated(run_id, "FINISHED")
            self._supersede(run_id, report)
            return run_id

    def _log_facts(self, run_id: str, report: RunReport) -> None:
        parameters = {"dataset": report.dataset.name, "variant": report.variant, "seed": report.seed, **flatten(report.parameters)}
        self._client.log_batch(run_id, params=[Param(name, str(value)) for name, value in parameters.items()])
        facts = {
            f"{record.step}.{name}": value for record in (report.checkpoint, report.embeddings) for name, value in record.facts.items()
        }
        dataset = {"dataset": report.dataset.name, "dataset_digest": report.dataset.digest, "dvc_digest": report.dvc_digest or "none"}
        tags = {**report.tags, **facts, **dataset, "variant": report.variant}
        self._client.log_batch(run_id, tags=[RunTag(f"dml.{name}", str(value)) for name, value in tags.items()])
        source = json.dumps({"uri": report.dataset.folder})
        lineage = Dataset(
            report.dataset.name, report.dvc_digest or report.dataset.digest, "local", source, profile=json.dumps(report.dataset.counts)
        )
        self._client.log_inputs(run_id, [DatasetInput(lineage, [InputTag("mlflow.data.context", "training")])])

    def _log_curves(self, run_id: str, report: RunReport) -> None:
        """Training curves per step and per epoch and the final scores; points that were streamed already are left out."""
        now = int(time.time() * 1000)
        history = read_history(self._store.pull(report.checkpoint.key))
        points = [
            (f"train/{name}", value, int(row["step"])) for row in history for name, value in row.items() if name not in ("epoch", "step")
        ]
        points += _epoch_means(history)
        points += [(_metric_name(name), value, 0) for name, value in report.scores.metrics.items()]
        there = {
            name: {m.step for m in self._client.get_metric_history(run_id, name)} for name in self._client.get_run(run_id).data.metrics
        }
        missing = [Metric(name, value, now, step) for name, value, step in points if step not in there.get(name, ())]
        for start in range(0, len(missing), MAX_METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=missing[start : start + MAX_METRICS_PER_BATCH])

    def _log_files(self, run_id: str, report: RunReport) -> None:
        for record in (report.checkpoint, report.embeddings, report.scores):
            self._client.log_artifacts(run_id, str(self._store.pull(record.key)), record.step)

    def _log_model(self, run_id: str, report: RunReport) -> None:
        """The trained network as a pyfunc: encoded images in, embeddings out, with its code and pinned requirements."""
        from dml_core.data.splits import open_role  # these two bring torchvision, which finding a published run does not need
        from tasks import packaged_model

        checkpoint = load_checkpoint(self._store.pull(report.checkpoint.key))
        assert checkpoint is not None
        training = parse(TrainingConfig, report.parameters["training"], "published run")
        dataset = open_role(Path(report.dataset.folder), "train", training.validation)
        mlflow.set_tracking_uri(self.uri)  # log_model has only the fluent interface; the lock is held
        with tempfile.TemporaryDirectory() as folder, mlflow.start_run(run_id=run_id):
            description = packaged_model.save(Path(folder), report.parameters["training"], len(dataset.class_names), checkpoint["system"])
            mlflow.pyfunc.log_model(
                name="model",
                python_model=packaged_model.__file__,
                artifacts={"network": folder},
                code_paths=[str(Path(dml_core.__file__).parent)],
                pip_requirements=[f"{name}=={version(name)}" for name in MODEL_REQUIREMENTS],
                signature=ModelSignature(
                    inputs=Schema([ColSpec("binary", packaged_model.COLUMN)]),
                    outputs=Schema([TensorSpec(np.dtype("float32"), (-1, description["embedding_dim"]))]),
                ),
                input_example=pd.DataFrame({packaged_model.COLUMN: [dataset.raw_bytes(0)]}),
            )

    def _supersede(self, run_id: str, report: RunReport) -> None:
        """Of the runs of one variant and seed in a comparison, the one that was published last is the current one."""
        parent = self._find_parent(report.comparison)
        same = f"tags.`{PARENT_TAG}` = '{parent}' and params.variant = '{report.variant}' and params.seed = '{report.seed}'"
        for run in self._search(same):
            current = str(run.info.run_id == run_id).lower()
            if run.data.tags.get(CURRENT_TAG) != current:
                self._client.set_tag(run.info.run_id, CURRENT_TAG, current)

    # ------------------------------------------------------------ finding and creating

    def _find_or_create_run(self, comparison: str, identity: str, title: str) -> str:
        found = self._search(f"tags.`{IDENTITY_TAG}` = '{identity}'")
        if found:
            return str(found[0].info.run_id)
        parent = self._find_parent(comparison) or self._create(comparison, {COMPARISON_TAG: comparison})
        return self._create(title, {PARENT_TAG: parent, IDENTITY_TAG: identity})

    def _current_runs(self, comparison: str) -> list[Any]:
        """The comparison's children that no newer one of their variant and seed has superseded."""
        with _told_as_tracking_error(self.uri):
            parent = self._find_parent(comparison)
            return self._search(f"tags.`{PARENT_TAG}` = '{parent}' and tags.`{CURRENT_TAG}` = 'true'") if parent else []

    def _find_parent(self, comparison: str) -> str | None:
        found = self._search(f"tags.`{COMPARISON_TAG}` = '{comparison}'")
        return str(found[0].info.run_id) if found else None

    def _create(self, name: str, tags: dict[str, str]) -> str:
        run = self._client.create_run(self._experiment(), run_name=name, tags=tags)
        if PARENT_TAG not in tags:
            self._client.set_terminated(run.info.run_id, "FINISHED")
        return str(run.info.run_id)

    def _search(self, filter_string: str) -> list[Any]:
        return list(self._client.search_runs([self._experiment()], filter_string, max_results=5000))

    def _experiment(self) -> str:
        """The experiment's id. Beside a local database the artifacts go to the state folder; a server has its own place."""
        found = self._client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return str(found.experiment_id)
        location = self._artifacts.absolute().as_uri() if self.uri.startswith("sqlite:") else None
        return str(self._client.create_experiment(EXPERIMENT, artifact_location=location))


class LiveCurves:
    """Epoch curves while a run trains, streamed by a thread of its own; when the server fails once, it is left alone."""

    def __init__(self, tracker: Tracker, comparison: str, identity: str, title: str) -> None:
        self._tracker = tracker
        self._of = (comparison, identity, title)
        self._run_id: str | None = None
        self._failed = False

    def __call__(self, progress: Progress) -> None:
        """Log an epoch's means; called with every message of a run."""
        if not progress.epoch_ended or self._failed:
            return
        try:
            with self._tracker._lock, _told_as_tracking_error(self._tracker.uri):
                self._run_id = self._run_id or self._tracker._find_or_create_run(*self._of)
                now = int(time.time() * 1000)
                metrics = [Metric(f"epoch/{name}", value, now, progress.epoch) for name, value in progress.metrics.items()]
                self._tracker._client.log_batch(self._run_id, metrics=metrics)
        except TrackingError as error:
            logger.warning("%s; no live curves for this run, training goes on", error)
            self._failed = True


def run_title(variant: str, seed: int) -> str:
    """How a run is called in MLflow, below its comparison."""
    return f"{variant}, seed {seed}"


def _metric_name(name: str) -> str:
    """MLflow allows no @ in names."""
    return name.replace("@", "_at_")


def _epoch_means(history: list[dict[str, float]]) -> list[tuple[str, float, int]]:
    """(name, mean over the epoch's steps, epoch) of the loss and its parts."""
    table = pd.DataFrame(history)
    if table.empty:
        return []
    means = table.drop(columns=["step", "learning_rate_factor"]).groupby("epoch").mean()
    return [(f"epoch/{name}", float(value), int(epoch)) for name in means for epoch, value in zip(means.index, means[name], strict=True)]


@contextmanager
def _told_as_tracking_error(uri: str) -> Iterator[None]:
    """Whatever goes wrong on the way to MLflow, as one line."""
    try:
        yield
    except (MlflowException, OSError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = "no answer" if "Max retries exceeded" in first_line else first_line[:200]
        raise TrackingError(f"MLflow at {uri} cannot be used: {reason}") from None
