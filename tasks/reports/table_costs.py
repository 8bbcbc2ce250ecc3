"""The section of a table's page about costs: what its runs used, predicted and actual time of the work, and money by a price file."""

from collections.abc import Sequence
from typing import get_args

from tasks.plans.prices import HOUR, KILOWATT_HOUR, Prices
from tasks.plans.times import TimedStep
from tasks.runs.costs import total_cost
from tasks.tables.file import TableFile
from tasks.tables.result import MeasuredRun, TableResult
from tasks.wording import duration, significant

UNKNOWN = "-"


def cost_rows(table: TableFile, result: TableResult, prices: Prices | None = None) -> list[list[str]]:
    """Return a header and a row for each line and dataset whose runs recorded their cost; nothing if none did.

    The row "all" counts once what several lines share: a training of which two epochs are scored, and a run that two rows show. Rows are in
    the table's order; `prices` adds a column with money.
    """
    groups: dict[tuple[str, str, str], list[MeasuredRun]] = {}
    for run in sorted((run for run in result.runs if run.row in table.rows and run.costs), key=lambda run: list(table.rows).index(run.row)):
        groups.setdefault((run.row, run.label.removeprefix(f"{run.row} "), run.dataset), []).append(run)
    if not groups:
        return []
    header = ["row", "dataset", "runs", "wall", "predicted work", "work", "lost"]
    header += ["CPU hours", "GPU hours", "peak memory", "moved", "energy", *([] if prices is None else ["money"])]
    rows = [header]
    for (row, variant, dataset), runs in groups.items():
        rows.append([f"{table.rows[row].label} {variant}", dataset, *_cells(runs, prices)])
    if len(groups) > 1:
        rows.append(["all", "", *_cells([run for runs in groups.values() for run in runs], prices)])
    return rows


def _cells(runs: Sequence[MeasuredRun], prices: Prices | None) -> list[str]:
    """Return the number of runs and the sum of their costs; equal costs of one dataset, seed and step are of one step, and count once."""
    steps = {(run.dataset, run.seed, step, cost) for run in runs for step, cost in run.costs.items()}
    num_runs = len({(run.dataset, run.seed, run.costs.get("train", run.identity)) for run in runs})
    costs = sorted(((step, cost) for *_, step, cost in steps), key=str)
    total = total_cost(cost for _, cost in costs)
    in_workers = [cost for step, cost in costs if step in get_args(TimedStep)]
    work = total_cost(in_workers)
    is_predicted = all(cost.predicted_seconds is not None for cost in in_workers)
    return [
        str(num_runs),
        duration(total.wall_seconds),
        duration(work.predicted_seconds) if is_predicted and work.predicted_seconds is not None else UNKNOWN,
        duration(work.work_seconds or 0.0),
        duration(total.lost_seconds),
        significant(total.cpu_seconds / HOUR, 2),
        significant(total.gpu_seconds / HOUR, 2),
        f"{total.peak_memory_bytes / 1e9:.2f} GB",
        f"{significant(total.moved_bytes / 1e9, 2)} GB",
        UNKNOWN if total.energy_joules is None else f"{significant(total.energy_joules / KILOWATT_HOUR, 2)} kWh",
        *([] if prices is None else [prices.text(total)]),
    ]
