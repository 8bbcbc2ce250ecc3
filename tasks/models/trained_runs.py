"""Trained runs of the standing comparison and of tables in the store, found by their identities. Nothing here loads torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from dml_core.config import check_known
from tasks.data import dataset_if_intact
from tasks.environment import Project
from tasks.plans.results import load_result, runs_today, standing_seeds
from tasks.runs.finished import finished_identities, finished_scores
from tasks.runs.identity import StepIdentity, embed_step, evaluate_step, network_identity, train_step
from tasks.runs.params.comparison import runnable_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import RunSpec
from tasks.runs.tuned import STANDING
from tasks.storage import Store, open_store
from tasks.tables.file import load_table, table_names
from tasks.tables.result import result_path


@dataclass(frozen=True)
class TrainedRun:
    """A finished run in the store, with the identities of its steps; None if a step is missing.

    `older_code` has the source files that differ from those that made it; empty for the current code.
    """

    spec: RunSpec
    dataset: DatasetRecord
    trained: str
    embedded: str | None
    scored: str | None
    older_code: tuple[str, ...] = ()

    @property
    def network(self) -> str:
        """Identity of the network that the run scores."""
        return network_identity(self.trained, self.spec.evaluation.epoch)


def trained_runs(project: Project, dataset: str | None = None) -> list[TrainedRun]:
    """Return every trained run of the standing comparison, or those on one dataset of it, in the order of `params.yaml`.

    Raises:
        ConfigError: the comparison has no such dataset.
    """
    params = load_params(project.params_file)
    if dataset is not None:
        check_known("dataset of the comparison", dataset, params.comparison.datasets)
    names = [name for name in params.comparison.datasets if dataset in (None, name)]
    records = [(name, record) for name in names if (record := dataset_if_intact(project, name)) is not None]
    seeds = standing_seeds(project, params)
    return [*trained_among(project, ((spec, record) for name, record in records for spec in runnable_runs(params, name, seeds[name])))]


def trained_runs_of_table(project: Project, name: str) -> list[TrainedRun]:
    """Return the measured runs in a table's result, with today's settings, by column and row: of all variants, epochs and seeds.

    Raises:
        ConfigError: there is no such table.
    """
    table, params = load_table(name), load_params(project.params_file)
    measured = load_result(project, name).model_copy(update={"failed": ()})
    runs = trained_among(project, runs_today(project, params, measured))
    return sorted(runs, key=lambda run: (table.datasets.index(str(run.spec.column)), [*table.rows].index(str(run.spec.row))))


def trained_among(project: Project, runs: Iterable[tuple[RunSpec, DatasetRecord]]) -> Iterator[TrainedRun]:
    """Yield those of the runs whose networks are in the store, made by the current code or older code. Their files are not checked."""
    store = open_store(project)

    def stored(kind: str, step: StepIdentity) -> tuple[str | None, tuple[str, ...]]:
        """Return the identity under which a step's files are in the store, or None, and the source files that differ."""
        for identity, files in finished_identities(project.state, step).items():
            key = f"{kind}/{identity}"
            if store.list_objects(key) if store.is_remote else store.folder(key).is_dir():
                return identity, files
        return None, ()

    for spec, dataset in runs:
        trained, of_training = stored("train", train_step(spec, dataset))
        if trained is None:
            continue
        embedded, of_embedding = stored("embed", embed_step(spec, trained))
        scored, of_scoring = (None, ()) if embedded is None else stored("evaluate", evaluate_step(spec, embedded))
        older_code = tuple(sorted({*of_training, *of_embedding, *of_scoring}))
        yield TrainedRun(spec, dataset, trained, embedded, scored, older_code)


def run_of(project: Project, identity: str) -> TrainedRun | None:
    """Return the run of the standing comparison, or else of a measured table, whose network or training has this identity, or None."""
    measured = (name for name in table_names() if name != STANDING and result_path(project, name).is_file())
    for runs in chain([trained_runs(project)], (trained_runs_of_table(project, name) for name in measured)):
        for run in sorted(runs, key=lambda run: run.network != identity):  # of several epochs of a training the one with this identity
            if identity in (run.network, run.trained):
                return run
    return None


def run_scores(store: Store, run: TrainedRun) -> dict[str, float]:
    """Return a run's metrics; empty if its network is not scored.

    Raises:
        StoreError: they are damaged.
    """
    if run.embedded is None or run.scored is None:
        return {}
    folder = store.pull(f"evaluate/{run.scored}")
    return finished_scores(folder, trained=run.trained, embedded=run.embedded, scored=run.scored) or {}
