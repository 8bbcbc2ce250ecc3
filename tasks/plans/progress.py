"""Progress of each table: the runs measured so far, and whether the current code, settings and data would give the same runs.

Of imported runs, only settings and data count, which also decide whether `dml plan` and `dml reproduce` reuse them. Runs of the common
track and with tuned settings do not count: they are not the table's systems.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.plans.plan import LocalState, TablePlan, plan_tables
from tasks.plans.results import load_result
from tasks.runs.identity import step_identities
from tasks.runs.specs import RunSpec
from tasks.tables.choice import Choice
from tasks.tables.file import TableFile, load_table
from tasks.tables.present import has_present_settings, spec_today
from tasks.tables.result import MeasuredRun

How = Literal["not run", "failed", "partly", "done", "stale"]


@dataclass(frozen=True)
class Measured:
    """Progress on one kind of data.

    Attributes:
        runs: number of pairs of a row to be run and a dataset.
        done, stale: number of pairs that have an up-to-date run, and number that only have outdated ones.
        seeds: smallest number of up-to-date seeds among the pairs that are done; of a pair, that of the variant and epoch with the most.
        failed: number of pairs without any run whose last attempt failed.
    """

    runs: int
    done: int
    stale: int
    seeds: int
    failed: int = 0


@dataclass(frozen=True)
class TableState:
    """Progress of a table.

    Attributes:
        own_data: progress on the paper's own datasets; stand_in: on datasets used instead of them.
        plan: plan of the table with one seed.
    """

    name: str
    table: TableFile
    own_data: Measured
    stand_in: Measured
    plan: TablePlan

    @property
    def how(self) -> How:
        """Progress in a word.

        "done" if every row to be run has an up-to-date run with at least one seed on each of the paper's own datasets; "stale" if a row
        and dataset were only measured with other code, settings or data; "failed" if nothing is measured and a run failed.
        """
        if self.own_data.stale:
            return "stale"
        if not self.own_data.done:
            return "failed" if self.own_data.failed else "not run"
        return "done" if self.own_data.done == self.own_data.runs else "partly"


def table_states(local: LocalState, names: Sequence[str]) -> list[TableState]:
    """Return the progress of each table."""
    return [_state(local, plan) for plan in plan_tables(local, names, Choice(), alone=True)]


def _state(local: LocalState, plan: TablePlan) -> TableState:
    table = load_table(plan.name)
    result = load_result(local.project, plan.name).of_rows
    measured: dict[tuple[str, str], list[MeasuredRun]] = {}
    for run in result.runs:
        measured.setdefault((run.row, run.dataset), []).append(run)
    places = list(dict.fromkeys((str(run.spec.row), run.dataset) for run in plan.runs))
    failed = {(run.row, run.dataset) for run in result.failed} - measured.keys()
    specs = dict[tuple[object, ...], RunSpec | None]()
    today = {place: [run for run in measured.get(place, ()) if _is_todays(local, plan.name, table, run, specs)] for place in places}

    def counted(is_stand_in: bool) -> Measured:
        here_places = [place for place in places if (place[1] in table.stand_ins) == is_stand_in]
        seeds = [max(Counter(run.label for run in today[place]).values()) for place in here_places if today[place]]
        stale = sum(bool(measured.get(place)) and not today[place] for place in here_places)
        return Measured(len(here_places), len(seeds), stale, min(seeds, default=0), len(failed.intersection(here_places)))

    return TableState(plan.name, table, counted(is_stand_in=False), counted(is_stand_in=True), plan)


def _is_todays(local: LocalState, name: str, table: TableFile, run: MeasuredRun, specs: dict[tuple[object, ...], RunSpec | None]) -> bool:
    """Return whether the current code and settings, on the dataset on this machine, would give the measured run.

    The code of an imported run does not count, as when it is reused, nor its data where the dataset is not prepared on this machine.
    `specs` has the present runs of the table's lines, which differ only in their seeds; those that are missing are added.
    """
    record = local.dataset(run.dataset, table)
    if run.is_imported:
        return has_present_settings(local.params, name, table, run, record.digest if record.folder else run.digest)
    line = run.row, run.variant, run.epoch, run.dataset, *run.training.get("keep_epochs", ())
    if line not in specs:
        specs[line] = spec_today(local.params, name, table, run)
    if (spec := specs[line]) is None:
        return False
    spec = spec.model_copy(update={"dataset": record.name, "seed": run.seed})
    return step_identities(spec, record)["evaluate"] == run.identity
