"""Publishing to MLflow: one experiment per dataset, one parent run per comparison, one child per run.

Only the modules of `tasks/tracking` import MLflow. Publishing is idempotent: a run is found in its dataset's experiment by comparison,
variant and identity, and only what is missing is added. A run that ran again with other scores is a new one. A superseded run is deleted in
MLflow's sense: hidden, and restored when its settings are used again. A report that cannot be delivered is kept in the outbox,
`state/outbox/`, and delivered by `dml sync`.

Locks are shared by all threads and processes with the same state folder. `mlflow.lock` is held while an experiment or a run is searched or
created, so that others find what one creates. `mlflow.locks/` has one for each record of the outbox, held during its delivery: one for each
variant and seed of a comparison, of which one run is kept. No run waits for the upload of another. A local database is SQLite, which allows
one writer at a time: each call holds `mlflow.locks/database`, and so does the logging of a model there.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LifecycleStage, Metric, Param, Run, ViewType

from dml_core.errors import DmlError, TrackingError
from dml_core.training.history import read_history
from tasks.environment import shown
from tasks.locks import alone
from tasks.runs.records import ComparisonReport, RunReport, check_unchanged, read_scores
from tasks.runs.specs import RunSpec, comparison_title
from tasks.storage import Store
from tasks.tracking import child_run, connection
from tasks.tracking.child_run import NAME_LETTERS, SUPERSEDED, PublishedRun, current_tags, experiment_name
from tasks.tracking.comparison_run import experiment_tags, mark_older_code, publish_comparison
from tasks.tracking.connection import (
    CONFIG,
    LOCKS,
    SQLITE,
    check_listed,
    database_lock,
    log_metrics,
    one_line_errors,
    open_client,
    runs_in,
    set_tags,
)
from tasks.tracking.outbox import OUTBOX, keep_report, read_report, runs_wait, waits_since
from tasks.tracking.tags import Tag

REPLACED = (
    "MLflow at %s: runs of '%s' that were published from another folder are replaced; if that folder is another project's, give each "
    "project a server or a workspace (MLFLOW_WORKSPACE)"
)
NEWER = (
    "%s: MLflow has a run of '%s' that was published after this record began to wait; the record is not delivered; dml reproduce publishes "
    "its run in place of that one"
)
logger = logging.getLogger(__name__)
_model_lock = threading.Lock()  # logging a model changes the process's tracking address and MLflow's functions


class Tracker:
    """Publisher to one tracking server, with an outbox for when it is unavailable.

    The project's state folder also has a local database and its artifacts. The published files are read from `store`.
    """

    def __init__(self, uri: str, state: Path, store: Store) -> None:
        self.uri = uri
        self.outbox = state / OUTBOX
        self._state = state
        self._store = store
        self._lock, self._locks = state / "mlflow.lock", state / LOCKS
        self._has_warned = False  # of runs that this project did not publish
        self._begun: dict[tuple[str, str], str] = {}  # comparison and identity of a run that trains -> its id
        self._marked: set[tuple[str, str]] = set()  # comparisons and variants whose seeds of older code this process has marked

    @cached_property
    def _client(self) -> MlflowClient:
        """MLflow's client, created on first use: it opens or creates a local database, and a damaged one is reported as unusable."""
        client: MlflowClient = open_client(self.uri, self._state)
        return client

    def load(self) -> None:
        """Load MLflow's libraries and open or create a local database; otherwise the first publication does.

        Raises:
            TrackingError: MLflow cannot be used.
        """
        import mlflow.pyfunc  # noqa: F401

        import tasks.tracking.models  # noqa: F401

        with one_line_errors(self.uri):
            _ = self._client

    def publish(self, report: RunReport | ComparisonReport) -> str | None:
        """Deliver a report, or keep it in the outbox; return the MLflow run's id, or None if it was kept.

        A comparison waits for its runs: its content is read from those that MLflow has.
        """
        report = report.model_copy(update={"tags": report.tags | child_run.source_tags()})
        with alone(self._locks / report.outbox_name):
            waiting = keep_report(self.outbox, report)
            if isinstance(report, ComparisonReport) and runs_wait(self.outbox, report.comparison, self._locks):
                return None
            try:
                run_id = self._deliver(report)
            except TrackingError as error:
                logger.warning("%s; the record is kept, deliver it later with `dml sync`", error)
                return None
            waiting.unlink()
            return run_id

    def sync(self) -> int:
        """Deliver everything in the outbox; return the number of reports delivered. A comparison waits for its runs, as in `publish`.

        A run's record is dropped with a warning if MLflow has got a newer run of its variant and seed meanwhile, as from another machine.

        Raises:
            TrackingError: after the others were delivered: MLflow refuses some reports, some are damaged and set aside, or files of their
                runs or datasets are changed or missing, which the next run makes again.
        """
        num_delivered, faults = 0, dict[str, list[str]]()
        for path in sorted(self.outbox.glob("*.json")):
            with alone(self._locks / path.name):
                if not path.exists():  # another process delivered it meanwhile
                    continue
                try:
                    report = read_report(path)
                    if isinstance(report, ComparisonReport) and runs_wait(self.outbox, report.comparison, self._locks):
                        continue
                    if isinstance(report, RunReport) and self._has_newer(report, waits_since(path, report)):
                        path.unlink()
                        logger.warning(NEWER, child_run.run_title(report.dataset.name, report.variant, report.seed), report.comparison)
                        continue
                    self._deliver(report)
                except DmlError as error:
                    if isinstance(error, TrackingError):
                        with one_line_errors(self.uri):
                            self._client.search_experiments(max_results=1)  # if MLflow answers, the error is of this record
                    faults.setdefault(str(error).removeprefix(f"{path}: "), []).append(str(path))
                    continue
                path.unlink()
                num_delivered += 1
        if faults:
            failed = "; ".join(f"{', '.join(paths)}: {fault}" for fault, paths in faults.items())
            raise TrackingError(f"records delivered: {num_delivered}, failed: {sum(map(len, faults.values()))}: {failed}")
        return num_delivered

    def begin_run(self, comparison: str, identity: str, spec: RunSpec) -> str:
        """Find or create the run that is being trained and return its id.

        Raises:
            TrackingError: MLflow does not accept it.
        """
        settings = spec.model_dump(mode="json", include={"training", "evaluation"})
        with alone(self._lock), one_line_errors(self.uri):
            run_id = str(self._find_or_create_run(comparison, identity, spec.dataset, spec.label, spec.seed, settings).info.run_id)
        self._begun[comparison, identity] = run_id
        return run_id

    def end_failed(self, comparison: str, identity: str) -> None:
        """Show a run that `begin_run` began as failed, if MLflow answers; it is running again once it is retried."""
        run_id = self._begun.pop((comparison, identity), None)
        if run_id is not None:
            with suppress(TrackingError), one_line_errors(self.uri):
                if self._client.get_run(run_id).info.status == "RUNNING":  # and not a published one, trained again with another result
                    self._client.set_terminated(run_id, "FAILED")

    def log_epochs(self, run_id: str, points: Sequence[tuple[str, float, int]]) -> None:
        """Add (metric, mean, epoch) to a run's curves; skip those that MLflow has, of epochs that are trained again.

        Raises:
            TrackingError: MLflow does not accept them.
        """
        with one_line_errors(self.uri):
            log_metrics(self._client, run_id, self._new_points(self._client.get_run(run_id), points))

    # ------------------------------------------------------------ delivery

    def _has_newer(self, report: RunReport, kept_at: float) -> bool:
        """Return whether MLflow has another run of a report's variant and seed that ended after a time."""
        place = current_tags(report.comparison) | {Tag.VARIANT: report.variant, Tag.SEED: str(report.seed)}
        with one_line_errors(self.uri):
            experiment = self._client.get_experiment_by_name(experiment_name(report.dataset.name))
            runs = [] if experiment is None else runs_in(self._client, [experiment.experiment_id], place)
        return any(
            run.data.tags.get(Tag.IDENTITY) != report.identity or not PublishedRun.of_mlflow(run).has_scores(report.scores.metrics)
            for run in runs
            if (run.info.end_time or 0) > 1000 * kept_at
        )

    def _deliver(self, report: RunReport | ComparisonReport) -> str:
        with one_line_errors(self.uri):
            if isinstance(report, RunReport):
                return self._complete_run(report)
            with alone(self._lock):
                parent = self._find_or_create_parent(report.comparison, self._experiment(report.dataset))
            publish_comparison(self._client, parent, report)
            return parent

    def _complete_run(self, report: RunReport) -> str:
        with alone(self._lock):
            place = report.comparison, report.identity, report.dataset.name, report.variant, report.seed
            run = self._find_or_create_run(*place, report.parameters, report.scores.metrics)
        run_id = str(run.info.run_id)
        if Tag.PUBLISHED in run.data.tags:
            check_listed(self.uri, self._client, run)
        if run.data.tags.get(Tag.PUBLISHED) == "true" and self._has_files(run, report):
            of_source = {f"dml.{name}" for name in report.tags} | child_run.mlflow_tags(report.tags).keys()  # of what made it, not of today
            self._log_facts(run, report, (run.data.tags.keys() | of_source) - {Tag.SETTINGS})  # those that a later version adds or changes
            self._supersede_others(run, report)  # if a user had deleted it, it was restored next to its successor
        else:
            for record, _ in child_run.artifact_steps(report):
                self._store.checked(record)
            scores = read_scores(report.scores, self._store.folder(report.scores.key))  # of the recorded file
            report = report.model_copy(update={"scores": scores})
            if Tag.PUBLISHED in run.data.tags:
                check_unchanged(report.dataset)  # or the run stays as it is
                self._client.set_tag(run_id, Tag.PROCESS, child_run.process_tag())
                self._client.delete_tag(run_id, Tag.PUBLISHED)  # if this is interrupted, the next publication completes it
            history = read_history(self._store.folder(report.checkpoint.key))
            self._log_facts(run, report, {Tag.NOTE} & run.data.tags.keys())  # a user may have written a description
            # The model comes first: MLflow reads all points that a run has when it logs a model.
            model_id = None if report.scores_only else self._log_model(run, report, len(history))
            self._client.update_run(run_id, "RUNNING")  # MLflow ends a run with its model
            points = self._new_points(run, [*child_run.curve_points(history)])
            log_metrics(self._client, run_id, points + _new_scores(run, report, model_id))
            self._log_files(run_id, report)
            self._supersede_others(run, report)
            self._client.set_terminated(run_id, "FINISHED")
            self._client.delete_tag(run_id, Tag.PROCESS)
            self._client.set_tag(run_id, Tag.PUBLISHED, "true")
        if "older_code" in report.tags:  # source files that differ from those that made it
            self._client.set_tag(run_id, Tag.OLDER_CODE, report.tags["older_code"])
        elif Tag.OLDER_CODE in run.data.tags:
            self._client.delete_tag(run_id, Tag.OLDER_CODE)
        variant = report.comparison, report.variant
        if variant not in self._marked and mark_older_code(self._client, run.info.experiment_id, report):
            self._marked.add(variant)
        return run_id

    def _log_facts(self, run: Run, report: RunReport, known: Collection[str]) -> None:
        """Log tags, without the `known` ones, description and dataset."""
        parent_link = child_run.run_link(run.info.experiment_id, run.data.tags[Tag.PARENT])
        tags = child_run.published_tags(report, parent_link)
        set_tags(self._client, run.info.run_id, {name: value for name, value in tags.items() if name not in known})
        dataset = Dataset(**child_run.dataset_input(report))
        self._client.log_inputs(run.info.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])

    def _new_points(self, run: Run, points: Sequence[tuple[str, float, int]]) -> list[Metric]:
        """Return metrics at their steps, without points that MLflow has already, streamed or from an interrupted publication."""
        now, names = int(time.time() * 1000), {name for name, _, _ in points} & run.data.metrics.keys()
        logged = {(name, metric.step) for name in names for metric in self._client.get_metric_history(run.info.run_id, name)}
        return [Metric(name, value, now, step) for name, value, step in points if (name, step) not in logged]

    def _log_files(self, run_id: str, report: RunReport) -> None:
        """Log settings, scores and figures, then the other steps' files, as on the page.

        Only files that a step recorded are logged: a killed worker may have left others in its folder.
        """
        self._client.log_text(run_id, yaml.safe_dump(report.parameters, sort_keys=False), CONFIG)
        for record, name, path in child_run.artifact_files(report):
            self._client.log_artifact(run_id, str(self._store.folder(record.key) / name), path.rpartition("/")[0] or None)

    def _has_files(self, run: Run, report: RunReport) -> bool:
        """Return whether MLflow has all files and the model of a published run: a user or a bucket's rule may have deleted some."""
        from tasks.tracking.registered import find_model, has_network

        model_id = None if report.scores_only else find_model(self._client, run)
        has_model = report.scores_only or (model_id is not None and has_network(self._client, model_id))
        files = {path for _, _, path in child_run.artifact_files(report)}
        folders = {path.rpartition("/")[0] for path in files}
        logged = {entry.path for folder in folders for entry in self._client.list_artifacts(run.info.run_id, folder or None)}
        return has_model and files <= logged

    def _log_model(self, run: Run, report: RunReport, num_steps: int) -> str:
        """Log the network, described by the dataset's present files, and return the model's id; an earlier attempt may have logged it."""
        from tasks.tracking.models import log_model
        from tasks.tracking.registered import intact_model

        if (model_id := intact_model(self._client, run)) is not None:
            return model_id
        check_unchanged(report.dataset)
        checkpoint = self._store.folder(report.checkpoint.key)
        with _model_lock, database_lock(self.uri, self._state)():
            return log_model(self.uri, run.info.run_id, report, checkpoint, num_steps)

    def _supersede_others(self, run: Run, report: RunReport) -> None:
        """Keep the last published run of one variant and seed in a comparison; delete the others.

        The first of them that was published from another folder, which may be another project's, is reported.
        """
        place = {Tag.PART: report.comparison, Tag.VARIANT: report.variant, Tag.SEED: str(report.seed)}
        published = runs_in(self._client, [run.info.experiment_id], place)
        for other in (entry for entry in published if entry.info.run_id != run.info.run_id):
            if other.info.status == "RUNNING":
                self._client.set_terminated(other.info.run_id, "KILLED")
            if not self._has_warned and other.data.tags.get(Tag.FOLDER, report.dataset.folder) != report.dataset.folder:
                self._has_warned = True
                logger.warning(REPLACED, shown(self.uri), report.comparison)
            self._client.set_tag(other.info.run_id, Tag.PUBLISHED, SUPERSEDED)
            self._client.delete_run(other.info.run_id)

    # ------------------------------------------------------------ finding and creating

    def _find_or_create_run(
        self,
        comparison: str,
        identity: str,
        dataset: str,
        variant: str,
        seed: int,
        settings: dict[str, Any],
        scores: Mapping[str, float] = {},
    ) -> Run:
        """Return the run with this identity as found or created: restored if superseded, running again if killed, created if missing.

        A run with other scores is not it: the same steps ran again, with `--force` or after damage, and have another result. If MLflow died
        between a run's creation and its parameters, they are added now.
        """
        parameters, defaults = child_run.split_settings(dataset, variant, seed, settings)
        experiment = self._experiment(dataset)
        run: Run | None = self._find(experiment, {Tag.IDENTITY: identity, Tag.PART: comparison, Tag.VARIANT: variant}, scores)
        if run is None:
            parent = self._find_or_create_parent(comparison, experiment)
            tags = child_run.first_tags(parent, comparison, identity, variant, seed, defaults)
            run = self._client.create_run(experiment, run_name=child_run.run_title(dataset, variant, seed)[:NAME_LETTERS], tags=tags)
            self._log_parameters(run.info.run_id, parameters)
        elif run.data.tags.get(Tag.PUBLISHED) != "true":
            self._client.update_run(run.info.run_id, "RUNNING")
            self._client.set_tag(run.info.run_id, Tag.PROCESS, child_run.process_tag())
            self._log_parameters(run.info.run_id, {name: value for name, value in parameters.items() if name not in run.data.params})
        if run.data.tags.get(Tag.SEED) != str(seed):  # a user edited it
            self._client.set_tag(run.info.run_id, Tag.SEED, str(seed))
        return run

    def _log_parameters(self, run_id: str, parameters: dict[str, str]) -> None:
        self._client.log_batch(run_id, params=[Param(name, value) for name, value in parameters.items()])

    def _find_or_create_parent(self, comparison: str, experiment: str) -> str:
        run = self._find(experiment, {Tag.COMPARISON: comparison})
        if run is None:
            run = self._client.create_run(experiment, run_name=comparison[:NAME_LETTERS], tags={Tag.COMPARISON: comparison})
        if run.info.status == "RUNNING":  # new, or MLflow died just after it was created
            self._client.set_terminated(run.info.run_id, "FINISHED")
        return str(run.info.run_id)

    def _find(self, experiment: str, tags: dict[str, str], scores: Mapping[str, float] = {}) -> Any:
        """Return the experiment's newest run with these tags and no other scores, restored if all are deleted, or None."""
        tagged = runs_in(self._client, [experiment], tags, run_view_type=ViewType.ALL)
        runs = [run for run in tagged if PublishedRun.of_mlflow(run).has_scores(scores)]
        run = min(runs, key=lambda run: run.info.lifecycle_stage == LifecycleStage.DELETED, default=None)
        if run is not None and run.info.lifecycle_stage == LifecycleStage.DELETED:
            self._client.restore_run(run.info.run_id)
        return run

    def _experiment(self, dataset: str) -> str:
        """Return the experiment's id. With a local database the artifacts go to the state folder; a server has its own location.

        If a user has deleted it, it is restored: MLflow allows no other experiment with its name.
        """
        name = experiment_name(dataset)
        experiment = self._client.get_experiment_by_name(name)
        folder = (self._state / "mlartifacts" / dataset).absolute() if self.uri.startswith(SQLITE) else None
        if experiment is None:
            location = None if folder is None else folder.as_uri()
            tags = experiment_tags(comparison_title(dataset, "test"))
            return str(self._client.create_experiment(name, artifact_location=location, tags=tags))
        if folder is not None:
            connection.check_place(self.uri, experiment, folder)
        if experiment.lifecycle_stage == LifecycleStage.DELETED:
            self._client.restore_experiment(experiment.experiment_id)
            for run in runs_in(self._client, [experiment.experiment_id], {Tag.PUBLISHED: SUPERSEDED}):  # restored with the others
                self._client.delete_run(run.info.run_id)
        return str(experiment.experiment_id)


def _new_scores(run: Run, report: RunReport, model_id: str | None) -> list[Metric]:
    """Return the final scores that the run or its new model lacks; those that compare losses are linked to the model and the dataset."""
    main, detail = child_run.score_metrics(report.scores.metrics)
    dataset = child_run.dataset_input(report)
    linked = {"model_id": model_id, "dataset_name": dataset["name"], "dataset_digest": dataset["digest"], "run_id": run.info.run_id}
    now, others = int(time.time() * 1000), detail | child_run.cost_metrics(report)
    metrics = [Metric(name, value, now, 0, **linked) for name, value in main.items()]
    metrics += [Metric(name, value, now, 0) for name, value in others.items()]
    models = {None, *(output.model_id for output in (run.outputs.model_outputs if run.outputs else ()))}
    return [metric for metric in metrics if metric.key not in run.data.metrics or metric.model_id not in models]
