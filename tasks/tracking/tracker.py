"""MLflow: an experiment a dataset, one parent run a comparison, one child a run. The modules `tracking*` are the only ones that know it.

Publishing is idempotent: a run is found again by its identity, and only what it lacks is added. A superseded run is deleted in MLflow's
sense: out of sight, restorable, and restored when its settings come back. A report that cannot be delivered is kept in the outbox,
`state/outbox/`, and delivered by `dml sync`; training never waits for a server. Of the processes that share a state folder one at a time
talks to MLflow: what the one creates, the next one finds.
"""

import json
import logging
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag, ViewType

from dml_core.errors import StoreError, TrackingError
from dml_core.training.history import read_history
from tasks.locks import alone
from tasks.runs.records import ComparisonReport, RunReport, StepRecord, read_scores
from tasks.runs.specs import RunSpec, comparison_title
from tasks.storage import Store
from tasks.tracking import pages
from tasks.tracking.live import LiveCurves
from tasks.tracking.outbox import keep_report, read_report, waiting_runs
from tasks.tracking.published import (
    COMPARISON_TAG,
    EXPERIMENT_PREFIX,
    IDENTITY_TAG,
    OLDER_CODE_TAG,
    OUTBOX,
    PARENT_TAG,
    PART_TAG,
    PROCESS_TAG,
    PUBLISHED_TAG,
    SEED_TAG,
    TRAINED_TAG,
    VARIANT_TAG,
    PublishedRun,
    current_runs_filter,
    experiment_name,
    in_order,
)
from tasks.tracking.reading import all_runs, as_published, told_as_tracking_error
from tasks.tracking.summaries import compare_published, summarise_published

MAX_METRICS_PER_BATCH = 1000
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
        self.outbox = state / OUTBOX
        self._artifacts = state / "mlartifacts"
        self._store = store
        self._lock = state / "mlflow.lock"
        self._sent: dict[str, set[tuple[str, int]]] = {}  # run -> names and steps of the points that `log_epochs` knows to be there

    @cached_property
    def _client(self) -> MlflowClient:
        """Made when it is first used: it opens a local database, and a damaged one is told as any other that cannot be used."""
        return MlflowClient(self.uri)

    def publish(self, report: RunReport | ComparisonReport) -> str | None:
        """Deliver a report, or keep it in the outbox; the MLflow run's id, or None where it was kept.

        A comparison waits with its runs: what it says is read from those that MLflow has.
        """
        report = report.model_copy(update={"tags": report.tags | pages.source_tags()})
        with alone(self._lock):  # so that no other process's record is in the outbox for the moment of its delivery alone
            kept = keep_report(self.outbox, report)
            if isinstance(report, ComparisonReport) and waiting_runs(self.outbox):
                return None
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
            TrackingError: the server does not take them; what was not delivered stays. Or, after the others were delivered: some are
                damaged, which are set aside, or their runs' files are, which the next run makes anew.
        """
        with alone(self._lock):
            return self._sync()

    def _sync(self) -> int:
        num_delivered, faults = 0, []
        for path in sorted(self.outbox.glob("*.json")):
            report = read_report(path)
            if report is None:
                faults.append(f"{path}: damaged, set aside as {path.name}.damaged; `dml reproduce` publishes it again")
                continue
            try:
                self._deliver(report)
            except StoreError as error:
                faults.append(str(error))
                continue
            path.unlink()
            num_delivered += 1
        if faults:
            raise TrackingError(f"{num_delivered} records delivered, {len(faults)} not: {'; '.join(faults)}")
        return num_delivered

    def live(self, comparison: str, identity: str, spec: RunSpec) -> LiveCurves:
        """Curves of a run that is being trained, under the run that `publish` will complete."""
        return LiveCurves(self, comparison, identity, spec)

    def begin_run(self, comparison: str, identity: str, spec: RunSpec) -> str:
        """The id of the run that is being trained, found or created.

        Raises:
            TrackingError: MLflow does not take it.
        """
        parameters = spec.model_dump(mode="json", include={"training", "evaluation"})
        with alone(self._lock), told_as_tracking_error(self.uri):
            return self._find_or_create_run(comparison, identity, spec.dataset, spec.variant, spec.seed, parameters)

    def log_epochs(self, run_id: str, epochs: dict[int, dict[str, float]]) -> None:
        """Add means of epochs, by the epoch's number, to a run's curves; not those of an epoch that was sent before and is trained again.

        Raises:
            TrackingError: MLflow does not take them.
        """
        with alone(self._lock), told_as_tracking_error(self.uri):
            sent = self._sent.pop(run_id, None)  # gone where this call fails: what MLflow took of it is asked for anew
            if sent is None:
                sent = self._points_of(run_id, self._client.get_run(run_id).data.metrics)
            now, points = (
                int(time.time() * 1000),
                {(f"epoch/{name}", n): value for n, means in epochs.items() for name, value in means.items()},
            )
            self._log_metrics(run_id, [Metric(name, value, now, n) for (name, n), value in points.items() if (name, n) not in sent])
            self._sent[run_id] = sent | points.keys()

    def published(self, comparison: str) -> frozenset[str]:
        """Identities of the comparison's current runs that MLflow has whole, not marked as of older code; none where it is away."""
        try:
            with alone(self._lock), told_as_tracking_error(self.uri):
                runs = self._search(current_runs_filter(comparison))
        except TrackingError:
            return frozenset()  # publishing will try again, and say so
        return frozenset(run.data.tags[IDENTITY_TAG] for run in runs if OLDER_CODE_TAG not in run.data.tags)

    # ------------------------------------------------------------ delivery of a run

    def _deliver(self, report: RunReport | ComparisonReport) -> str:
        with told_as_tracking_error(self.uri):
            return self._deliver_comparison(report) if isinstance(report, ComparisonReport) else self._deliver_run(report)

    def _deliver_run(self, report: RunReport) -> str:
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
        """Say which source files differ from those that made the run, or that none does any more."""
        if files is not None:
            self._client.set_tag(run_id, OLDER_CODE_TAG, files)
        elif OLDER_CODE_TAG in self._client.get_run(run_id).data.tags:
            self._client.delete_tag(run_id, OLDER_CODE_TAG)

    def _checked(self, report: RunReport) -> RunReport:
        """The report with its scores read anew from the file that was recorded, after the files of all its steps were compared.

        Raises:
            StoreError: a file is not as recorded.
        """
        for record in () if report.scores_only else (report.checkpoint, report.embeddings):
            self._store.checked(record)
        return report.model_copy(update={"scores": read_scores(report.scores, self._store.checked(report.scores))})

    def _log_facts(self, run_id: str, report: RunReport) -> Dataset:
        facts = {
            f"{record.step}.{name}": value for record in (report.checkpoint, report.embeddings) for name, value in record.facts.items()
        }
        epoch = str(report.parameters["evaluation"].get("epoch", "last"))
        digests = {"epoch": epoch, "dataset_digest": report.dataset.digest, "dvc_digest": report.dvc_digest or "none"}
        tags = {f"dml.{name}": str(value) for name, value in (report.tags | facts | digests).items() if name not in pages.SOURCE_FACTS}
        run = self._client.get_run(run_id)
        tags[TRAINED_TAG] = report.checkpoint.identity
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
        """Log metrics at their steps; points that are there already, streamed or from a publish that broke off, are left out."""
        now, names = int(time.time() * 1000), {name for name, _, _ in points}
        there = self._points_of(run_id, names & self._client.get_run(run_id).data.metrics.keys())
        self._log_metrics(run_id, [Metric(name, value, now, step) for name, value, step in points if (name, step) not in there])

    def _points_of(self, run_id: str, names: Iterable[str]) -> set[tuple[str, int]]:
        """Names and steps of the points of a run's metrics."""
        return {(name, metric.step) for name in names for metric in self._client.get_metric_history(run_id, name)}

    def _log_scores(self, run_id: str, report: RunReport, lineage: Dataset, model_id: str | None) -> None:
        """The final scores, linked to the model and the dataset."""
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
        """By name, and so on the page: the settings, the figures, the scores, and then what the steps left."""
        self._client.log_text(run_id, yaml.safe_dump(report.parameters, sort_keys=False), "config.yaml")
        self._log_step(run_id, report.scores, "")
        for record in () if report.scores_only else (report.checkpoint, report.embeddings):
            self._log_step(run_id, record, f"steps/{record.step}")

    def _log_step(self, run_id: str, record: StepRecord, below: str) -> None:
        """The files that the step recorded: beside them lies what a killed worker had begun to write."""
        folder = self._store.pull(record.key)
        for file in record.files:
            place = (PurePosixPath(below) / file.name).parent.as_posix()
            self._client.log_artifact(run_id, str(folder / file.name), None if place == "." else place)

    def _log_model(self, run_id: str, report: RunReport, num_steps: int) -> str:
        from tasks.tracking.models import find_model, log_model

        found = find_model(self._client, self._client.get_run(run_id))
        checkpoint = self._store.pull(report.checkpoint.key)
        return found or log_model(self._client, self.uri, run_id, report, checkpoint, num_steps)

    def _supersede_others(self, run_id: str, report: RunReport) -> None:
        """Of the runs of one variant and seed in a comparison the one that is published last stays; the others are deleted."""
        same = f"tags.`{PART_TAG}` = '{report.comparison}' and tags.`{VARIANT_TAG}` = '{report.variant}'"
        for run in self._search(f"{same} and tags.`{SEED_TAG}` = '{report.seed}'"):
            if run.info.run_id == run_id:
                continue
            if run.info.status == "RUNNING":
                self._client.set_terminated(run.info.run_id, "KILLED")
            self._client.set_tag(run.info.run_id, PUBLISHED_TAG, "superseded")  # so that a restored one is completed and made current
            self._client.delete_run(run.info.run_id)

    # ------------------------------------------------------------ delivery of a comparison

    def _deliver_comparison(self, report: ComparisonReport) -> str:
        """Bring the parent run up to date with its current runs: means, description, report, registered model. Adds what has changed."""
        parent = self._find_or_create_parent(report.comparison, report.dataset)
        self._mark_killed(report.comparison)
        if report.is_search:
            self._describe_parent(parent, report, report.about or "")
            return parent
        runs = in_order(as_published(run) for run in self._search(current_runs_filter(report.comparison)))
        summaries, found = summarise_published(runs), compare_published(report.dataset, runs, report.reference)
        best = pages.best_run([run for run in runs if run.variant == next(iter(summaries))])
        run = self._client.get_run(parent)
        now = int(time.time() * 1000)
        means = pages.summary_metrics(summaries)
        self._log_metrics(parent, [Metric(name, mean, now, 0) for name, mean in means.items() if run.data.metrics.get(name) != mean])
        note = pages.describe_comparison(
            report.comparison,
            report.role,
            run.info.experiment_id,
            parent,
            summaries,
            runs,
            self._register(report, best),
            report.about,
            found,
        )
        self._describe_parent(parent, report, note)
        if report.comparison == comparison_title(report.dataset, "test"):
            link, view = pages.run_link(run.info.experiment_id, parent), pages.view_link(run.info.experiment_id)
            answer = pages.describe_experiment(link, view, summaries, found)
            self._client.set_experiment_tag(run.info.experiment_id, pages.NOTE_TAG, answer)
        return parent

    def _describe_parent(self, parent: str, report: ComparisonReport, note: str) -> None:
        """Description, tags and files of a parent run."""
        run = self._client.get_run(parent)
        named = {f"dml.{name}": report.tags[name] for name in ("paper", "table", "row") if name in report.tags}
        if run.data.tags.get(pages.NOTE_TAG) != note or not named.items() <= run.data.tags.items():
            self._set_tags(parent, _mlflow_tags(report.tags) | named | {pages.NOTE_TAG: note})
        if report.folder is not None and Path(report.folder).is_dir():
            self._client.log_artifacts(parent, report.folder)
        for path in report.files:
            if Path(path).is_file():
                self._client.log_artifact(parent, path)

    def _register(self, report: ComparisonReport, best: PublishedRun) -> str:
        """Register the model of the best run; the line that says so. Only a standing comparison's: one with other settings is a trial."""
        if report.comparison != comparison_title(report.dataset, report.role):
            return f"Model: {best.variant}, seed {best.seed} is best; only a standing comparison registers its model"
        from tasks.tracking.models import register_best, registered_name

        name = registered_name(report.dataset, report.role)
        what = f"{best.variant}, seed {best.seed}: the variant with the best mean Recall@1, and of its seeds the best on the same classes"
        version = register_best(self._client, name, self._client.get_run(best.run_id), what)
        return f"Model: [{name}, version {version}](#/models/{name}/versions/{version}), `models:/{name}@best` ({what})"

    def _mark_killed(self, comparison: str) -> None:
        """A run still running in MLflow, but whose process on this machine is gone, was killed; the same command goes on with it."""
        for run in self._search(f"tags.`{PART_TAG}` = '{comparison}' and attributes.status = 'RUNNING'"):
            if pages.has_ended(run.data.tags.get(PROCESS_TAG, "")):
                self._client.set_terminated(run.info.run_id, "KILLED")

    # ------------------------------------------------------------ finding and creating

    def _find_or_create_run(self, comparison: str, identity: str, dataset: str, variant: str, seed: int, parameters: dict[str, Any]) -> str:
        """The run with this identity, restored where it had been superseded, running again where it had been killed.

        MLflow may have died between a run's creation and its settings, which are then given to it now.
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
        """Runs of all our experiments, the newest first."""
        experiments = self._client.search_experiments(filter_string=f"name LIKE '{EXPERIMENT_PREFIX}%'")
        return all_runs(self._client, [experiment.experiment_id for experiment in experiments], filter_string, view)

    def _set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def _experiment(self, dataset: str) -> str:
        """The experiment's id. Beside a local database the artifacts go to the state folder; a server has its own place."""
        name = experiment_name(dataset)
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        location = (self._artifacts / dataset).absolute().as_uri() if self.uri.startswith("sqlite:") else None
        return str(self._client.create_experiment(name, artifact_location=location, tags=pages.experiment_tags()))


def _mlflow_tags(tags: dict[str, str]) -> dict[str, str]:
    """Source and user where MLflow's pages look for them."""
    known = {"command": pages.SOURCE_TAG, "user": pages.USER_TAG, "git_commit": pages.COMMIT_TAG}
    return {"mlflow.source.type": "LOCAL"} | {name: tags[fact] for fact, name in known.items() if fact in tags}
