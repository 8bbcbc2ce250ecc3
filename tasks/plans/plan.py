"""Plan the runs of tables: steps to run, reused steps, missing requirements, estimated time. Imports neither torch nor servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.plans.cost import Estimate, step_estimate, total
from tasks.plans.local_state import LocalState
from tasks.plans.needs import Need, needs_of
from tasks.runs.identity import embed_identity, evaluate_identity, train_identity
from tasks.runs.rates import Step
from tasks.runs.specs import RunSpec
from tasks.tables.choice import Choice
from tasks.tables.file import TableFile, load_table
from tasks.tables.runs import asked_runs

IDENTITIES = {"train": train_identity, "embed": embed_identity, "evaluate": evaluate_identity}
Will = Literal["run", "reused", "shared"]  # shared: with an earlier run of the plan


@dataclass(frozen=True)
class PlannedRun:
    """One run of a table.

    Attributes:
        dataset: its name in the table's columns.
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


def plan_tables(local: LocalState, names: Sequence[str], choice: Choice, alone: bool = False) -> list[TablePlan]:
    """Plan tables that are requested together; with `alone`, each as if it were the only one.

    Raises:
        ConfigError: see `asked_runs`.
    """
    asked = asked_runs(names, choice)
    seen: set[str] = set()
    plans = []
    for name in names:
        seen = set() if alone else seen
        found = {dataset: runs for (table, dataset), runs in asked.runs.items() if table == name}
        table = load_table(name)
        runs = [_planned(local, table, dataset, spec, seen) for dataset, specs in found.items() for spec in specs]
        options = {dataset: table.dataset_options(dataset) for dataset in found}
        needs = needs_of(local.project, local.params, options, [run.spec for run in runs if run.trains])
        plans.append(
            TablePlan(name, tuple(runs), tuple(asked.left_out[name]), tuple(needs), together(local, [run.estimate for run in runs]))
        )
    return plans


def together(local: LocalState, estimates: Sequence[Estimate]) -> Estimate:
    """Estimate how long several runs take that train in parallel: never less than the longest of them."""
    summed = total(estimates)
    if summed.seconds is None:
        return summed
    longest = max((estimate.seconds or 0.0 for estimate in estimates), default=0.0)
    return Estimate(max(summed.seconds / local.placement.num_groups, longest), summed.basis)


def _planned(local: LocalState, table: TableFile, dataset: str, spec: RunSpec, seen: set[str]) -> PlannedRun:
    record = local.dataset(dataset, table)
    spec = spec.model_copy(update={"dataset": record.name})
    identities = {
        step: of(spec, record) for step, of in (("train", train_identity), ("embed", embed_identity), ("evaluate", evaluate_identity))
    }
    steps: dict[str, Will] = {
        step: "reused" if local.is_finished(step, one) else "shared" if one in seen else "run" for step, one in identities.items()
    }
    seen.update(identities.values())
    timed: tuple[Step, ...] = ("train", "embed")
    parts = [step_estimate(step, spec, record.counts, local.rates, local.placement) for step in timed if steps[step] == "run"]
    return PlannedRun(spec, dataset, steps, total(parts))
