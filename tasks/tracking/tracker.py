"""Publishing to MLflow: one experiment per dataset, one parent run per comparison, one child per run.

Only the modules of `tasks/tracking` import MLflow. Publishing is idempotent: a run is found by its identity, and only what is missing is
added. A superseded run is deleted in MLflow's sense: hidden, restorable, and restored when its settings are used again. A report that
cannot be delivered is kept in the outbox, `state/outbox/`, and delivered by `dml sync`.

Locks are shared by all threads and processes with the same state folder. `mlflow.lock` is held while an experiment or a run is searched or
created, so that others find what one creates. `mlflow.locks/` has one for each record of the outbox, held during its delivery, and one for
each variant and seed of a comparison, of which one run is kept. No run waits for the upload of another. A local database is SQLite, which
allows one writer at a time: each call holds `mlflow.locks/database`, and so does the logging of a model there.
"""

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

import yaml
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag, ViewType

from dml_core.errors import StoreError, TrackingError
from dml_core.evaluation.statistics.comparing import Scores
from dml_core.evaluation.statistics.confidence import Summary
from dml_core.training.history import read_history
from tasks.locks import alone
from tasks.runs.best import best_run, said_best
from tasks.runs.comparable import settings_identity
from tasks.runs.records import ComparisonReport, RunReport, StepRecord, read_scores
from tasks.runs.specs import RunSpec, comparison_title
from tasks.storage import Store
from tasks.tracking import pages
from tasks.tracking.names import (
    COMPARISON_TAG,
    DIGEST_TAG,
    EXPERIMENT_PREFIX,
    IDENTITY_TAG,
    OLDER_CODE_TAG,
    OUTBOX,
    PARENT_TAG,
    PART_TAG,
    PROCESS_TAG,
    PUBLISHED_TAG,
    SEED_TAG,
    SETTINGS_TAG,
    SUMMARY_TAG,
    TRAINED_TAG,
    VARIANT_TAG,
    PublishedRun,
    current_runs_filter,
    experiment_name,
)
from tasks.tracking.outbox import keep_report, read_report, run_records
from tasks.tracking.published import in_order
from tasks.tracking.reading import all_pages, all_runs, as_published, told_as_tracking_error
from tasks.tracking.summaries import comparable_runs, compare_published, summarise_published, today_of, validation_scores

MAX_METRICS_PER_BATCH = 1000
logger = logging.getLogger(__name__)
_model_lock = threading.Lock()  # logging a model changes `sys.path` and the process's tracking address


class Tracker:
    """Publisher to one tracking server, with an outbox for when it is unavailable.

    Args:
        uri: MLflow's tracking address.
        state: the project's state folder, which also has a local database and its artifacts.
        store: store of the published files.
    """

    def __init__(self, uri: str, state: Path, store: Store) -> None:
        self.uri = uri
        self.outbox = state / OUTBOX
        self._artifacts = state / "mlartifacts"
        self._store = store
        self._lock, self._locks = state / "mlflow.lock", state / "mlflow.locks"
        self._sent: dict[str, set[tuple[str, int]]] = {}  # run -> names and steps of points that `log_epochs` knows MLflow has

    @cached_property
    def _client(self) -> MlflowClient:
        """MLflow's client, created on first use: it opens a local database, and a damaged one is reported as unusable."""
        client = MlflowClient(self.uri)
        return cast(MlflowClient, _OneCallAtATime(client, self._database)) if self.uri.startswith("sqlite:") else client

    def _database(self) -> AbstractContextManager[None]:
        """Return the lock that a writer to a local database holds."""
        return alone(self._locks / "database") if self.uri.startswith("sqlite:") else nullcontext()

    def publish(self, report: RunReport | ComparisonReport) -> str | None:
        """Deliver a report, or keep it in the outbox; return the MLflow run's id, or None if it was kept.

        A comparison waits for its runs: its content is read from those that MLflow has.
        """
        report = report.model_copy(update={"tags": report.tags | pages.source_tags()})
        with alone(self._locks / report.outbox_name):
            kept = keep_report(self.outbox, report)
            if isinstance(report, ComparisonReport) and self._runs_wait():
                return None
            try:
                run_id = self._deliver(report)
            except TrackingError as error:
                logger.warning("%s; the record is kept, deliver it later with `dml sync`", error)
                return None
            kept.unlink()
            return run_id

    def sync(self) -> int:
        """Deliver everything in the outbox; return the number of reports delivered.

        Raises:
            TrackingError: the server does not accept them, and undelivered reports stay. Or, after the others were delivered: some reports
                are damaged and set aside, or files of their runs are, which the next run makes again.
        """
        num_delivered, faults = 0, []
        for path in sorted(self.outbox.glob("*.json")):
            with alone(self._locks / path.name):
                if not path.exists():  # another process delivered it meanwhile
                    continue
                try:
                    self._deliver(read_report(path))
                except StoreError as error:
                    faults.append(str(error))
                    continue
                path.unlink()
                num_delivered += 1
        if faults:
            raise TrackingError(f"{num_delivered} records delivered, {len(faults)} failed: {'; '.join(faults)}")
        return num_delivered

    def begin_run(self, comparison: str, identity: str, spec: RunSpec) -> str:
        """Find or create the run that is being trained and return its id.

        Raises:
            TrackingError: MLflow does not accept it.
        """
        parameters = spec.model_dump(mode="json", include={"training", "evaluation"})
        with alone(self._lock), told_as_tracking_error(self.uri):
            return self._find_or_create_run(comparison, identity, spec.dataset, spec.label, spec.seed, parameters)

    def log_epochs(self, run_id: str, epochs: dict[int, dict[str, float]]) -> None:
        """Add means of epochs, by epoch number, to a run's curves; skip epochs that were sent before and are trained again.

        Raises:
            TrackingError: MLflow does not accept them.
        """
        with told_as_tracking_error(self.uri):
            sent = self._sent.pop(run_id, None)  # removed if this call fails: then MLflow is asked again
            if sent is None:
                sent = self._points_of(run_id, self._client.get_run(run_id).data.metrics)
            now, points = (
                int(time.time() * 1000),
                {(f"epoch/{name}", n): value for n, means in epochs.items() for name, value in means.items()},
            )
            self._log_metrics(run_id, [Metric(name, value, now, n) for (name, n), value in points.items() if (name, n) not in sent])
            self._sent[run_id] = sent | points.keys()

    def published(self, comparison: str) -> frozenset[str]:
        """Return identities of the comparison's complete runs that are not marked as of older code; empty if MLflow is unavailable."""
        try:
            with alone(self._lock), told_as_tracking_error(self.uri):
                runs = self._search(current_runs_filter(comparison))
        except TrackingError:
            return frozenset()  # publishing tries again and reports it
        return frozenset(run.data.tags[IDENTITY_TAG] for run in runs if OLDER_CODE_TAG not in run.data.tags)

    def _runs_wait(self) -> bool:
        """Return whether a run's record waits in the outbox, after any deliveries in progress."""
        for path in run_records(self.outbox):
            with alone(self._locks / path.name):
                if path.exists():
                    return True
        return False

    # ------------------------------------------------------------ delivery of a run

    def _deliver(self, report: RunReport | ComparisonReport) -> str:
        with told_as_tracking_error(self.uri):
            return self._deliver_comparison(report) if isinstance(report, ComparisonReport) else self._deliver_run(report)

    def _deliver_run(self, report: RunReport) -> str:
        place = hashlib.sha256(f"{report.comparison}\n{report.variant}\n{report.seed}".encode()).hexdigest()[:16]
        with alone(self._locks / place):
            return self._complete_run(report)

    def _complete_run(self, report: RunReport) -> str:
        with alone(self._lock):
            run_id = self._find_or_create_run(
                report.comparison, report.identity, report.dataset.name, report.variant, report.seed, report.parameters
            )
        if self._client.get_run(run_id).data.tags.get(PUBLISHED_TAG) != "true":
            report = self._checked(report)
            history = read_history(self._store.pull(report.checkpoint.key))
            lineage = self._log_facts(run_id, report)
            self._log_points(run_id, [*pages.curve_points(history)])
            model_id = None if report.scores_only else self._log_model(run_id, report, len(history))
            self._log_scores(run_id, report, lineage, model_id)
            self._log_files(run_id, report)
            self._supersede_others(run_id, report)
            self._client.set_terminated(run_id, "FINISHED")
            self._client.delete_tag(run_id, PROCESS_TAG)
            self._client.set_tag(run_id, PUBLISHED_TAG, "true")
        self._mark_older_code(run_id, report.tags.get("older_code"))
        return run_id

    def _mark_older_code(self, run_id: str, files: str | None) -> None:
        """Tag a run with the source files that differ from those that made it; remove the tag if none does."""
        if files is not None:
            self._client.set_tag(run_id, OLDER_CODE_TAG, files)
        elif OLDER_CODE_TAG in self._client.get_run(run_id).data.tags:
            self._client.delete_tag(run_id, OLDER_CODE_TAG)

    def _checked(self, report: RunReport) -> RunReport:
        """Return the report with scores read again from the recorded file, after checking the files of all its steps.

        Raises:
            StoreError: a file differs from its record.
        """
        for record in () if report.scores_only else (report.checkpoint, report.embeddings):
            self._store.checked(record)
        return report.model_copy(update={"scores": read_scores(report.scores, self._store.checked(report.scores))})

    def _log_facts(self, run_id: str, report: RunReport) -> Dataset:
        facts = {
            f"{record.step}.{name}": value for record in (report.checkpoint, report.embeddings) for name, value in record.facts.items()
        }
        epoch = str(report.parameters["evaluation"].get("epoch", "last"))
        settings = settings_identity(report.parameters["training"], report.parameters["evaluation"], report.dataset.digest)
        digests = {"epoch": epoch, "dvc_digest": report.dvc_digest or "none"}
        tags = {f"dml.{name}": str(value) for name, value in (report.tags | facts | digests).items() if name not in pages.SOURCE_FACTS}
        run = self._client.get_run(run_id)
        tags |= {TRAINED_TAG: report.checkpoint.identity, DIGEST_TAG: report.dataset.digest, SETTINGS_TAG: settings}
        parent = pages.run_link(run.info.experiment_id, run.data.tags[PARENT_TAG])
        tags[pages.NOTE_TAG] = pages.describe_run(report.dataset.name, report.variant, report.seed, parent, epoch)
        self._set_tags(run_id, tags | _mlflow_tags(report.tags))
        source = json.dumps({"uri": report.dataset.folder})
        lineage = Dataset(
            report.dataset.name, report.dvc_digest or report.dataset.digest, "local", source, profile=json.dumps(report.dataset.counts)
        )
        self._client.log_inputs(run_id, [DatasetInput(lineage, [InputTag("mlflow.data.context", "training")])])
        return lineage

    def _log_points(self, run_id: str, points: list[tuple[str, float, int]]) -> None:
        """Log metrics at their steps; skip points that MLflow has already, streamed or from an interrupted publication."""
        now, names = int(time.time() * 1000), {name for name, _, _ in points}
        there = self._points_of(run_id, names & self._client.get_run(run_id).data.metrics.keys())
        self._log_metrics(run_id, [Metric(name, value, now, step) for name, value, step in points if (name, step) not in there])

    def _points_of(self, run_id: str, names: Iterable[str]) -> set[tuple[str, int]]:
        """Return names and steps of the points of a run's metrics."""
        return {(name, metric.step) for name in names for metric in self._client.get_metric_history(run_id, name)}

    def _log_scores(self, run_id: str, report: RunReport, lineage: Dataset, model_id: str | None) -> None:
        """Log the final scores, linked to the model and the dataset."""
        main, detail = pages.score_metrics(report.scores.metrics)
        now = int(time.time() * 1000)
        there = self._client.get_run(run_id).data.metrics
        linked = {"model_id": model_id, "dataset_name": lineage.name, "dataset_digest": lineage.digest, "run_id": run_id}
        metrics = [Metric(name, value, now, 0, **linked) for name, value in main.items() if name not in there]
        metrics += [Metric(name, value, now, 0) for name, value in detail.items() if name not in there]
        self._log_metrics(run_id, metrics)

    def _log_metrics(self, run_id: str, metrics: list[Metric]) -> None:
        for start in range(0, len(metrics), MAX_METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=metrics[start : start + MAX_METRICS_PER_BATCH])

    def _log_files(self, run_id: str, report: RunReport) -> None:
        """Log settings, figures, scores, then the steps' files: sorted by name, as on the page."""
        self._client.log_text(run_id, yaml.safe_dump(report.parameters, sort_keys=False), "config.yaml")
        self._log_step(run_id, report.scores, "")
        for record in () if report.scores_only else (report.checkpoint, report.embeddings):
            self._log_step(run_id, record, f"steps/{record.step}")

    def _log_step(self, run_id: str, record: StepRecord, below: str) -> None:
        """Log only the files that the step recorded: a killed worker may have left others in its folder."""
        folder = self._store.pull(record.key)
        for file in record.files:
            place = (PurePosixPath(below) / file.name).parent.as_posix()
            self._client.log_artifact(run_id, str(folder / file.name), None if place == "." else place)

    def _log_model(self, run_id: str, report: RunReport, num_steps: int) -> str:
        from tasks.tracking.models import find_model, log_model

        found = find_model(self._client, self._client.get_run(run_id))
        checkpoint = self._store.pull(report.checkpoint.key)
        if found is not None:
            return found
        with _model_lock, self._database():
            return log_model(self._client, self.uri, run_id, report, checkpoint, num_steps)

    def _supersede_others(self, run_id: str, report: RunReport) -> None:
        """Keep the last published run of one variant and seed in a comparison; delete the others."""
        same = f"tags.`{PART_TAG}` = '{report.comparison}' and tags.`{VARIANT_TAG}` = '{report.variant}'"
        for run in self._search(f"{same} and tags.`{SEED_TAG}` = '{report.seed}'"):
            if run.info.run_id == run_id:
                continue
            if run.info.status == "RUNNING":
                self._client.set_terminated(run.info.run_id, "KILLED")
            self._client.set_tag(run.info.run_id, PUBLISHED_TAG, "superseded")  # so that a restored run is completed and made current
            self._client.delete_run(run.info.run_id)

    # ------------------------------------------------------------ delivery of a comparison

    def _deliver_comparison(self, report: ComparisonReport) -> str:
        """Update the parent run from its current runs: means, description, report, registered model. Adds what has changed."""
        with alone(self._lock):
            parent = self._find_or_create_parent(report.comparison, report.dataset)
        self._mark_killed(report.comparison)
        if report.is_search:
            self._describe_parent(parent, report, report.about or "")
            return parent
        published = in_order(as_published(run) for run in self._search(current_runs_filter(report.comparison)))
        selected = comparable_runs(report.dataset, published, today_of(report))
        runs, experiment = list(selected.runs), self._client.get_run(parent).info.experiment_id
        summaries, found = summarise_published(runs), compare_published(report.dataset, runs, report.reference)
        validation = validation_scores(runs)
        self._log_means(parent, pages.summary_metrics(summaries))
        note = pages.describe_comparison(
            report.comparison,
            report.role,
            experiment,
            parent,
            summaries,
            runs,
            self._register(report, runs, validation),
            report.about,
            found,
            validation,
            selected.left_out,
        )
        self._describe_parent(parent, report, note)
        if report.comparison == comparison_title(report.dataset, "test"):
            self._publish_variants(report, summaries)
            link, view = pages.run_link(experiment, parent), pages.view_link(experiment)
            answer = pages.describe_experiment(link, view, summaries, said_best(validation), found)
            for tag, value in {pages.NOTE_TAG: answer, **pages.experiment_tags(report.comparison)}.items():
                self._client.set_experiment_tag(experiment, tag, value)
        return parent

    def _log_means(self, run_id: str, means: dict[str, float]) -> None:
        """Log the metrics that have changed; one without a value becomes NaN, since MLflow deletes none."""
        there, now = self._client.get_run(run_id).data.metrics, int(time.time() * 1000)
        gone = {name: math.nan for name, value in there.items() if name not in means and not math.isnan(value)}
        changed = {name: mean for name, mean in means.items() if there.get(name) != mean}
        self._log_metrics(run_id, [Metric(name, value, now, 0) for name, value in (changed | gone).items()])

    def _publish_variants(self, report: ComparisonReport, summaries: dict[str, dict[str, Summary]]) -> None:
        """Keep one run per variant with its means, for the saved view; delete those of variants without means."""
        there = {run.data.tags[VARIANT_TAG]: run.info.run_id for run in self._search(f"tags.`{SUMMARY_TAG}` = '{report.comparison}'")}
        for variant in there.keys() - summaries.keys():
            self._client.delete_run(there[variant])
        for variant, metrics in summaries.items():
            run_id = there.get(variant)
            if run_id is None:
                tags = {SUMMARY_TAG: report.comparison, VARIANT_TAG: variant}
                run_id = self._client.create_run(
                    self._experiment(report.dataset), run_name=f"{variant}, mean over seeds", tags=tags
                ).info.run_id
                self._client.set_terminated(run_id, "FINISHED")
            num_seeds = max(summary.num_seeds for summary in metrics.values())
            self._log_means(run_id, {name: summary.mean for name, summary in metrics.items()} | {pages.NUM_SEEDS: float(num_seeds)})

    def _describe_parent(self, parent: str, report: ComparisonReport, note: str) -> None:
        """Set description, tags and files of a parent run."""
        run = self._client.get_run(parent)
        named = {f"dml.{name}": report.tags[name] for name in ("paper", "table", "row") if name in report.tags}
        if run.data.tags.get(pages.NOTE_TAG) != note or not named.items() <= run.data.tags.items():
            self._set_tags(parent, _mlflow_tags(report.tags) | named | {pages.NOTE_TAG: note})
        if report.folder is not None and Path(report.folder).is_dir():
            self._client.log_artifacts(parent, report.folder)
        for path in report.files:
            if Path(path).is_file():
                self._client.log_artifact(parent, path)

    def _register(self, report: ComparisonReport, runs: Sequence[PublishedRun], validation: Scores) -> str:
        """Register the model of the best run by validation scores; return the line about it.

        Only the standing comparison registers a model (one with other settings is a trial), and only if classes are held out.
        """
        best = best_run(validation)
        if best is None or report.comparison != comparison_title(report.dataset, report.role):
            why = "" if best is None else " (only the standing comparison registers its model)"
            return f"Model: {said_best(validation)}{why}"
        from tasks.tracking.models import register_best, registered_name

        run_id = next(run.run_id for run in runs if (run.variant, run.seed) == (best.variant, best.seed))
        name = registered_name(report.dataset, report.role)
        version = register_best(self._client, name, self._client.get_run(run_id), str(best))
        return f"Model: [{name}, version {version}](#/models/{name}/versions/{version}), `models:/{name}@best`. {said_best(validation)}"

    def _mark_killed(self, comparison: str) -> None:
        """Mark runs as killed that are running in MLflow but whose process on this machine has ended; the same command resumes them."""
        for run in self._search(f"tags.`{PART_TAG}` = '{comparison}' and attributes.status = 'RUNNING'"):
            if pages.has_ended(run.data.tags.get(PROCESS_TAG, "")):
                self._client.set_terminated(run.info.run_id, "KILLED")

    # ------------------------------------------------------------ finding and creating

    def _find_or_create_run(self, comparison: str, identity: str, dataset: str, variant: str, seed: int, parameters: dict[str, Any]) -> str:
        """Return the run with this identity: restored if superseded, running again if killed, created if missing.

        If MLflow died between a run's creation and its settings, they are added now.
        """
        changed, defaults = pages.split_parameters(parameters)
        settings = {"dataset": dataset, "variant": variant, "seed": str(seed)} | changed
        found = self._search(f"tags.`{IDENTITY_TAG}` = '{identity}'", ViewType.ALL)
        if found:
            run_id = str(found[0].info.run_id)
            if found[0].info.lifecycle_stage == "deleted":
                self._client.restore_run(run_id)
            if found[0].data.tags.get(PUBLISHED_TAG) != "true":
                self._client.update_run(run_id, "RUNNING")
                self._client.set_tag(run_id, PROCESS_TAG, pages.process_tag())
                self._log_settings(run_id, {name: value for name, value in settings.items() if name not in found[0].data.params})
            return run_id
        parent = self._find_or_create_parent(comparison, dataset)
        facts = {PARENT_TAG: parent, IDENTITY_TAG: identity, PART_TAG: comparison, VARIANT_TAG: variant, SEED_TAG: str(seed)}
        facts |= {pages.DEFAULTS_TAG: pages.one_line(defaults), PROCESS_TAG: pages.process_tag()} | _mlflow_tags(pages.source_tags())
        run = self._client.create_run(self._experiment(dataset), run_name=pages.run_title(dataset, variant, seed), tags=facts)
        self._log_settings(run.info.run_id, settings)
        return str(run.info.run_id)

    def _log_settings(self, run_id: str, settings: dict[str, str]) -> None:
        self._client.log_batch(run_id, params=[Param(name, value) for name, value in settings.items()])

    def _find_or_create_parent(self, comparison: str, dataset: str) -> str:
        found = self._search(f"tags.`{COMPARISON_TAG}` = '{comparison}'")
        run = found[0] if found else None
        if run is None:
            run = self._client.create_run(self._experiment(dataset), run_name=comparison, tags={COMPARISON_TAG: comparison})
        if run.info.status == "RUNNING":  # new, or MLflow died just after it was created
            self._client.set_terminated(run.info.run_id, "FINISHED")
        return str(run.info.run_id)

    def _search(self, filter_string: str, view: int = ViewType.ACTIVE_ONLY) -> list[Any]:
        """Return runs of all this project's experiments, newest first."""
        experiments = all_pages(partial(self._client.search_experiments, filter_string=f"name LIKE '{EXPERIMENT_PREFIX}%'"))
        return all_runs(self._client, [experiment.experiment_id for experiment in experiments], filter_string, view)

    def _set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def _experiment(self, dataset: str) -> str:
        """Return the experiment's id. With a local database the artifacts go to the state folder; a server has its own location."""
        name = experiment_name(dataset)
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        location = (self._artifacts / dataset).absolute().as_uri() if self.uri.startswith("sqlite:") else None
        tags = pages.experiment_tags(comparison_title(dataset, "test"))
        return str(self._client.create_experiment(name, artifact_location=location, tags=tags))


class _OneCallAtATime:
    """MLflow's client of a local database with a lock around each call: of 16 writing threads SQLite refuses some ("database is locked").

    Uploads do not take the lock: their bytes do not go to the database.
    """

    UPLOADS = frozenset({"log_artifact", "log_artifacts", "log_text"})

    def __init__(self, client: MlflowClient, lock: Callable[[], AbstractContextManager[None]]) -> None:
        self._client, self._lock = client, lock

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return method if name in self.UPLOADS else partial(self._call, method)

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._lock():
            return method(*arguments, **options)


def _mlflow_tags(tags: dict[str, str]) -> dict[str, str]:
    """Return command, user and commit under the tags that MLflow's pages read."""
    known = {"command": pages.SOURCE_TAG, "user": pages.USER_TAG, "git_commit": pages.COMMIT_TAG}
    return {"mlflow.source.type": "LOCAL"} | {name: tags[fact] for fact, name in known.items() if fact in tags}
