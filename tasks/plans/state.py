"""How far each table is: what was measured of it, and whether today's code, settings and data would still measure the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dml_core.errors import ConfigError
from tasks.plans.here import Here
from tasks.plans.plan import TablePlan, plan_tables
from tasks.plans.results import load_result
from tasks.runs.identity import evaluate_identity
from tasks.runs.protocols import COMMON
from tasks.tables.choice import Choice
from tasks.tables.file import TableFile, label_parts, load_table
from tasks.tables.result import MeasuredRun
from tasks.tables.runs import runs_of

How = Literal["not run", "partly", "done", "stale"]


@dataclass(frozen=True)
class TableState:
    """How far a table is.

    Attributes:
        how: "done" where each row that is to be run was measured on each of its datasets as it would be today, with one seed at least;
            "stale" where something was measured otherwise and not again since: by other code or settings, or on other data.
        num_runs: rows to be run, on each of their datasets.
        num_done, num_stale: how many of them are as today, and how many are only otherwise.
        num_seeds: the fewest of those that are done.
        plan: what is still to run with one seed, and what for.
    """

    name: str
    table: TableFile
    how: How
    num_runs: int
    num_done: int
    num_stale: int
    num_seeds: int
    plan: TablePlan


def table_states(here: Here, names: Sequence[str]) -> list[TableState]:
    """How far these tables are."""
    return [_state(here, plan) for plan in plan_tables(here, names, Choice(), alone=True)]


def _state(here: Here, plan: TablePlan) -> TableState:
    table = load_table(plan.name)
    measured: dict[tuple[str, str], list[MeasuredRun]] = {}
    for run in load_result(here.project, plan.name).runs:
        measured.setdefault((run.row, run.dataset), []).append(run)
    places = list(dict.fromkeys((label_parts(run.spec.variant)[0], run.dataset) for run in plan.runs))
    today = {place: [run for run in measured.get(place, ()) if is_todays(here, plan.name, table, run)] for place in places}
    num_done = sum(bool(today[place]) for place in places)
    num_stale = sum(bool(measured.get(place)) and not today[place] for place in places)
    how: How = "stale" if num_stale else "not run" if not num_done else "done" if num_done == len(places) else "partly"
    num_seeds = min((len({run.seed for run in found}) for found in today.values() if found), default=0)
    return TableState(plan.name, table, how, len(places), num_done, num_stale, num_seeds, plan)


def is_todays(here: Here, name: str, table: TableFile, run: MeasuredRun) -> bool:
    """Whether today's code and settings, on the dataset as it is here, would be the very run that was measured."""
    choice = Choice((run.row,), (), run.variant, seeds=(run.seed,), epochs=(run.epoch,))
    if run.variant == COMMON:
        choice = Choice((run.row,), track="common", seeds=(run.seed,))
    try:
        found = runs_of(name, table, choice, (run.row,), (run.dataset,))[run.dataset]
    except (ConfigError, KeyError):
        return False  # the row, its variant or its dataset is no longer in the file
    record = here.dataset(run.dataset, table)
    specs = [spec.model_copy(update={"dataset": record.name}) for spec in found]
    return any(evaluate_identity(spec, record) == run.identity for spec in specs)
