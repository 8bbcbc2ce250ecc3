"""`dml plan`: what tables would run, what is reused, how long it takes, and what is missing."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.app import app, examples
from flows.cli.columns import Column, print_table
from flows.cli.options import AsJson, NumSeeds, PriceFile, Rows, Seeds, TrackName, request_of
from flows.cli.session import open_project, print_lines, say
from tasks.environment import ray_cluster, shown
from tasks.wording import counted, duration, significant

if TYPE_CHECKING:
    from tasks.plans.plan import TablePlan
    from tasks.plans.prices import Prices
    from tasks.plans.resources import Resources
    from tasks.plans.times import Estimate
    from tasks.runs.costs import Cost

Datasets = Annotated[
    list[str] | None, typer.Option("--dataset", "-d", metavar="DATASET", help="Only columns of this dataset; repeat for several.")
]
Variants = Annotated[
    list[str] | None,
    typer.Option("--variant", "-v", metavar="VARIANT", help="Variant, for example as_released. Default: each row's first."),
]
MANY_RUNS = 40  # above it, tables are printed instead of single runs


@app.command(epilog=examples("dml plan softtriple/table1 --row softtriple --seeds 5", "dml plan 'softtriple/*' --json"))
def plan(
    tables: Annotated[list[str], typer.Argument(help="Tables or figures, for example softtriple/table1 or 'softtriple/*'.")],
    row: Rows = None,
    dataset: Datasets = None,
    variant: Variants = None,
    track: TrackName = None,
    seed: Seeds = None,
    seeds: NumSeeds = None,
    prices: PriceFile = None,
    as_json: AsJson = False,
) -> None:
    """Print the runs of tables that `dml reproduce` would start.

    Also prints which steps are reused, the time of the others (estimated from rates measured on this machine), the disk space and memory
    they need, and what is missing, with what to do about it.
    """
    project = open_project()
    if address := ray_cluster():
        say(f"note: planned for this machine, not for the Ray cluster at {shown(address)}")
    from tasks.plans.plan import LocalState, plan_tables
    from tasks.plans.prices import read_prices
    from tasks.plans.resources import resources_of
    from tasks.plans.results import unmeasured_runs
    from tasks.plans.times import total
    from tasks.runs.params.file import load_params
    from tasks.tables.file import chosen_tables
    from tasks.tables.runs import at_scale, run_together, runs_of_tables
    from tasks.tables.seeds_auto import FIRST_SEEDS

    names, priced = chosen_tables(tables), read_prices(prices) if prices else None
    request = request_of(tables, seed, seeds, variant, track=track, rows=row, datasets=dataset)
    is_auto = request.until is not None
    if is_auto:
        request = replace(request, resolve=None, seeds=tuple(range(FIRST_SEEDS)))
    starting = dict.fromkeys(name for name, _ in runs_of_tables(names, request)[0])
    local = LocalState(project, at_scale(load_params(project.params_file), together := run_together(starting, say)))
    names = [name for name in names if name in together or name not in starting]
    plans = plan_tables(local, names, request, reuse_imported=not is_auto)
    runs = [run for plan in plans for run in plan.runs]
    estimate = total([run.estimate for run in runs], local.placement.num_groups)
    needs = list(dict.fromkeys(need for plan in plans for need in plan.needs))
    resources = resources_of(local, plans)
    if as_json:
        entry = {
            "tables": [_entry(plan) for plan in plans],
            "num_runs": len(runs),
            "num_to_train": sum(run.trains for run in runs),
            **_time_entry(estimate),
            **_cost_entry(estimate, priced),
            "needs": [asdict(need) for need in needs],
            **_resources_entry(resources),
        }
        print(json.dumps(entry, indent=1))
        return
    _print_plans(plans, estimate, priced)
    first_seeds = "--seeds auto: these are the first seeds; how many more are needed depends on their results"
    notes = [first_seeds] if is_auto else unmeasured_runs(project, [run.spec for run in runs])[-1]
    of_needs = (f"{'missing' if need.stops else 'not downloaded yet'}: {need.what}: {need.do}" for need in needs)
    for line in [*notes, *resources.lines(), *of_needs]:
        print_lines(line)


def _print_plans(plans: Sequence["TablePlan"], estimate: "Estimate", prices: "Prices | None") -> None:
    """Print the runs, or their tables, what is omitted, and the number of runs with their time and cost."""
    runs = [run for plan in plans for run in plan.runs]
    if runs:
        (_print_runs if len(runs) <= MANY_RUNS else _print_tables)(plans)
    for plan in plans:
        for why in plan.left_out:
            print_lines(f"{plan.name}: omitted: {why}")
    num_to_train = sum(run.trains for run in runs)
    if runs:
        print_lines(f"{counted(len(runs), 'run')}, {num_to_train} to train: {time_of(estimate)}")
    else:
        reason = "" if any(plan.left_out for plan in plans) else ": no row matches on these datasets"
        print_lines(f"nothing can be run{reason}")
    if estimate.cost is not None and num_to_train:
        print_lines(_cost_line(estimate.cost, prices))


def time_of(estimate: "Estimate") -> str:
    """Return a time with the basis of its estimate, unless it was measured."""
    if estimate.seconds is None:
        return estimate.basis
    return f"about {duration(estimate.seconds)}" + (f" ({estimate.basis})" if estimate.basis != "measured" else "")


def _print_runs(plans: Sequence["TablePlan"]) -> None:
    runs = [(plan.name, run) for plan in plans for run in plan.runs]
    print_table(
        Column("table", [name for name, _ in runs], drop=1 if len(plans) == 1 else None),
        Column("row", [run.spec.label for _, run in runs], wraps=True),
        Column("dataset", [run.dataset for _, run in runs]),
        Column("seed", [str(run.spec.seed) for _, run in runs]),
        Column("train", [run.steps["train"] for _, run in runs]),
        Column("embed", [run.steps["embed"] for _, run in runs], drop=2),
        Column("evaluate", [run.steps["evaluate"] for _, run in runs], drop=3),
        Column(
            "time",
            [time_of(run.estimate) if "run" in (run.steps["train"], run.steps["embed"]) else "" for _, run in runs],
            drop=4,
            wraps=True,
        ),
    )


def _print_tables(plans: Sequence["TablePlan"]) -> None:
    to_train, reused, shared = (
        [str(sum(run.steps["train"] == kind for run in plan.runs)) for plan in plans] for kind in ("run", "reused", "shared")
    )
    print_table(
        Column("table", [plan.name for plan in plans]),
        Column("runs", [str(len(plan.runs)) for plan in plans]),
        Column("to train", to_train),
        Column("reused", reused, drop=3),
        Column("same as one above", shared, drop=2),
        Column("time", [time_of(plan.estimate) if plan.runs else "" for plan in plans], wraps=True),
        Column("needs", [", ".join(need.what for need in plan.needs) for plan in plans], drop=1, wraps=True),
    )


def _entry(plan: "TablePlan") -> dict[str, Any]:
    runs = [
        {
            "row": run.spec.row,
            "variant": run.spec.variant,
            "epoch": run.spec.evaluation.epoch,
            "dataset": run.dataset,
            "seed": run.spec.seed,
            **run.steps,
            **_time_entry(run.estimate),
        }
        for run in plan.runs
    ]
    needs = [asdict(need) for need in plan.needs]
    return {"name": plan.name, "runs": runs, "left_out": list(plan.left_out), "needs": needs, **_time_entry(plan.estimate)}


def _time_entry(estimate: "Estimate") -> dict[str, Any]:
    return {"seconds": estimate.seconds, "seconds_from": estimate.basis}


def _cost_entry(estimate: "Estimate", prices: "Prices | None") -> dict[str, Any]:
    cost = estimate.cost
    money = {} if prices is None else {"money": None if cost is None else prices.money(cost), "currency": prices.currency}
    return {"cost": None if cost is None else cost.model_dump(include={"cpu_seconds", "gpu_seconds", "energy_joules"}), **money}


def _cost_line(cost: "Cost", prices: "Prices | None") -> str:
    """Return the predicted cost of training and embedding as one line."""
    from tasks.plans.prices import HOUR, KILOWATT_HOUR

    parts = [f"{significant(cost.cpu_seconds / HOUR, 2)} CPU hours"]
    parts += [f"{significant(cost.gpu_seconds / HOUR, 2)} GPU hours"] if cost.gpu_seconds else []
    parts += [f"{significant(cost.energy_joules / KILOWATT_HOUR, 2)} kWh"] if cost.energy_joules is not None else []
    parts += [prices.text(cost)] if prices is not None else []
    return f"training and embedding cost about {', '.join(parts)}"


def _resources_entry(resources: "Resources") -> dict[str, Any]:
    memory = resources.memory
    return {
        "disk_bytes": resources.disk_bytes,
        "disk_unknown": [need.what for need in resources.disk if need.num_bytes is None],
        "disk_free_bytes": resources.disk_free,
        "memory_bytes": None if memory is None else memory.total,
        "memory_of": resources.memory_of or None,
    }
