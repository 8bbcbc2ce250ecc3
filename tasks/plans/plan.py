"""Plan the runs of tables: steps to run, reused steps, missing requirements, estimated time. Imports neither torch nor servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from dml_core.data.registry import published_dataset
from tasks.checks import is_prepared
from tasks.data import dataset_if_intact
from tasks.environment import Project, finished_records
from tasks.plans.needs import Need, needs_of
from tasks.plans.times import Estimate, TimedStep, placement_here, read_rates, step_estimate, total
from tasks.runs.comparable import Facts
from tasks.runs.identity import step_identities
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params, RunSpec
from tasks.sealed import DamagedError
from tasks.storage import open_store
from tasks.tables.choice import Choice
from tasks.tables.file import TableFile, load_table
from tasks.tables.result import facts_of, imported_runs, read_result
from tasks.tables.runs import named_dataset, runs_of_tables

Will = Literal["run", "reused", "shared"]  # shared: with an earlier run of the plan


class LocalState:
    """Prepared datasets, finished steps and measured rates of a project on this machine.

    Args:
        project: its data and state are read; its environment is set.
        params: the project's parameters.
    """

    def __init__(self, project: Project, params: Params) -> None:
        self.project = project
        self.params = params
        self.rates = read_rates(project.state)
        self.placement = placement_here(params.scale)
        self._records = finished_records()
        self._store = open_store(project)
        self._known_datasets = cache(self._dataset)

    def dataset(self, dataset: str, table: TableFile) -> DatasetRecord:
        """Return a table's dataset; if not prepared, without a folder, with its published counts, if any, and a digest that no run has."""
        return self._known_datasets(dataset, tuple(sorted(table.dataset_options(dataset).items())))

    def _dataset(self, dataset: str, options: tuple[tuple[str, Any], ...]) -> DatasetRecord:
        name = named_dataset(self.params, dataset, dict(options))
        prepared = None if name is None else dataset_if_intact(self.project, name)
        if prepared is not None and is_prepared(self.project, self.params, prepared.name):
            return prepared
        kind = published_dataset(dataset)
        counts = {} if kind is None else {role: part.num_images for role, part in kind.published.items()}
        return DatasetRecord(name=name or dataset, folder="", digest=f"not prepared: {dataset}", counts=counts, source=dataset)

    def imported(self, table: str) -> frozenset[Facts]:
        """Return the facts of a table's imported runs; none of a damaged result, which the next command that uses it rebuilds."""
        try:
            return frozenset(imported_runs(self.project, read_result(self.project, table)))
        except DamagedError:
            return frozenset()

    def is_finished(self, step: str, identity: str) -> bool:
        """Return whether a step's record and, in a local store, its folder exist; a flow checks their bytes when it reuses them."""
        return (self._records / identity).is_file() and (self._store.is_remote or self._store.folder(f"{step}/{identity}").is_dir())


@dataclass(frozen=True)
class PlannedRun:
    """One run of a table.

    Attributes:
        spec: on the project's dataset; dataset: its name in the table's columns.
        steps: train, embed, evaluate -> whether the step will run, is reused or is shared.
        estimate: time of the training and embedding still to do.
    """

    spec: RunSpec
    dataset: str
    steps: dict[str, Will]
    estimate: Estimate

    @property
    def trains(self) -> bool:
        """True if a network will be trained for it."""
        return self.steps["train"] == "run"


@dataclass(frozen=True)
class TablePlan:
    """The plan of a table.

    Attributes:
        left_out: reasons why some rows have no run, one line each.
        needs: missing requirements.
        estimate: time of all its runs, with as many at a time as the parameters allow.
    """

    name: str
    runs: tuple[PlannedRun, ...]
    left_out: tuple[str, ...]
    needs: tuple[Need, ...]
    estimate: Estimate


def plan_tables(
    local: LocalState, names: Sequence[str], choice: Choice, alone: bool = False, reuse_imported: bool = True
) -> list[TablePlan]:
    """Plan tables that are requested together; with `alone`, each as if it were the only one.

    `reuse_imported`: False for the seeds of `--seeds auto`, which are all measured here.

    Raises:
        ConfigError: see `runs_of_tables`.
    """
    requested, left_out = runs_of_tables(names, choice)
    planned: set[str] = set()  # identities of the steps so far
    plans = []
    for name in names:
        planned = set() if alone else planned
        table = load_table(name)
        specs = {dataset: runs for (table_name, dataset), runs in requested.items() if table_name == name}
        imported = local.imported(name) if reuse_imported else frozenset[Facts]()
        runs = [_planned(local, table, dataset, spec, planned, imported) for dataset in specs for spec in specs[dataset]]
        options = {dataset: table.dataset_options(dataset) for dataset in specs}
        needs = needs_of(local.project, local.params, options, [run.spec for run in runs if run.trains])
        estimate = total([run.estimate for run in runs], local.placement.num_groups)
        plans.append(TablePlan(name, tuple(runs), tuple(left_out[name]), tuple(needs), estimate))
    return plans


def _planned(local: LocalState, table: TableFile, dataset: str, spec: RunSpec, planned: set[str], imported: frozenset[Facts]) -> PlannedRun:
    record = local.dataset(dataset, table)
    spec = spec.model_copy(update={"dataset": record.name})
    identities = step_identities(spec, record)
    is_imported = bool(imported) and facts_of(spec, record.digest) in imported

    def will(step: str, identity: str) -> Will:
        if is_imported or local.is_finished(step, identity):
            return "reused"
        return "shared" if identity in planned else "run"

    steps = {step: will(step, identity) for step, identity in identities.items()}
    planned.update(() if is_imported else identities.values())
    timed: tuple[TimedStep, ...] = ("train", "embed")
    times = [step_estimate(step, spec, record.counts, local.rates, local.placement) for step in timed if steps[step] == "run"]
    return PlannedRun(spec, dataset, steps, total(times))
