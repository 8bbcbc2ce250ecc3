"""The flow of the papers' tables: every row that can be run, on its datasets, over seeds, with one start of Ray for all requested tables.

prepare each dataset (DVC; drawn for --smoke) -> every run's chain (flows/run.py), once for all tables that show it -> each table's page
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow, runtime

from flows.choices import TableName
from flows.concluding import TableOutcome, conclude
from flows.outcomes import RunsFailedError
from flows.resolving import run_until_resolved
from flows.run import STEPS_AT_ONCE, prepare_checked, run_chains
from flows.services import Services
from flows.smoke import run_smoke
from flows.step_cache import forget_failure
from tasks.checks import check_parts, check_settings
from tasks.environment import open_project
from tasks.plans.needs import check_tables
from tasks.runs.finished import Code
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params, RunSpec, load_params
from tasks.tables.choice import Choice, Track
from tasks.tables.file import label_parts, load_table, paper_tables, run_label
from tasks.tables.judging import compared_columns
from tasks.tables.runs import at_scale, chosen_runs, column_dataset
from tasks.tables.seeds_auto import checked_resolve
from tasks.tables.smoke import SUFFIX, draw_for_smoke, table_of


def flow_run_name(asked: dict[str, Any]) -> str:
    """Return the name of a flow run in Prefect's pages: its table and rows, or the number of tables and the first of them."""
    tables = asked.get("tables") or []
    what = tables[0] if len(tables) == 1 else f"{len(tables)} tables ({tables[0]} ...)" if tables else "all tables"
    parts = [name for kind in ("rows", "datasets") for name in asked.get(kind) or ()]
    parts += [asked["variant"]] if asked.get("variant") else []
    parts += ["common track"] if asked.get("track") == "common" else []
    parts += [f"seeds {', '.join(map(str, asked['seeds']))}"] if asked.get("seeds") else []
    parts += [said for kind, said in (("smoke", "smoke"), ("prepared_only", "on what is prepared")) if asked.get(kind)]
    return f"{what}: {', '.join(parts)}" if parts else what


def _flow_run_name() -> str:
    return flow_run_name(runtime.flow_run.parameters)


@flow(name="table", flow_run_name=_flow_run_name, task_runner=STEPS_AT_ONCE, on_failure=[forget_failure])
def table(
    tables: list[TableName] | None = None,
    rows: list[str] | None = None,
    datasets: list[str] | None = None,
    variant: str | None = None,
    track: Track = "paper",
    seeds: list[int] | None = None,
    smoke: bool = False,
    prepared_only: bool = False,
    one_row: bool = False,
    force: bool = False,
    fail_fast: bool = False,
    code: Code = "strict",
    resolve: float | None = None,
    max_seeds: int | None = None,
) -> list[TableOutcome]:
    """Run tables or figures of the papers; finished steps are reused, and what several tables show runs once.

    Args:
        tables: names as listed by `dml tables`; by default all of the papers.
        rows, datasets: narrow the tables that have them.
        variant: variant of the paper's protocol, as `as_released`, for every row that has it.
        track: "paper", each system as its authors ran it, or "common", every loss in the common track's protocol.
        seeds: every row runs once with each; by default 0.
        smoke: run the same systems on a few drawn images, for one epoch; tests the chain and says nothing about the papers.
        prepared_only: skip datasets that are not prepared.
        one_row: with smoke, one run per table: that whose network most others share.
        force: run every step again.
        fail_fast: stop when a run fails; otherwise the others continue.
        code: "strict" to rerun what changed code made, "keep" to reuse and mark it.
        resolve: instead of seeds: add seeds until half of the 95 % interval of each row's difference to the reference is at most this many
            points, by the first metric of each dataset.
        max_seeds: maximum number of seeds for `resolve`.
    """
    project = open_project()
    names = tables or paper_tables()
    params = at_scale(load_params(project.params_file), map(load_table, names))
    choice = Choice(
        tuple(rows or ()),
        tuple(datasets or ()),
        variant,
        track,
        (0,) if resolve is not None else tuple(seeds or (0,)),
        smoke,
        prepared_only,
        one_row,
    )
    chosen = chosen_runs(params, names, choice)
    runs = check_tables(project, params, chosen, choice)
    with closing(Services(project, params.scale)) as services:
        prepared = {
            dataset: _prepare([spec for spec in runs if spec.dataset == dataset], params, services, smoke)
            for dataset in dict.fromkeys(spec.dataset for spec in runs)
        }
        if smoke:
            outcomes, failures = run_smoke(runs, prepared, services, fail_fast)
        elif resolve is not None:
            run = partial(run_chains, prepared=prepared, services=services, force=force, fail_fast=fail_fast, code=code)
            asked = checked_resolve(resolve, max_seeds)
            outcomes, failures = run_until_resolved(runs, asked, partial(_looked_at, params), run, services.display.say, fail_fast)
        else:
            outcomes, failures = run_chains(runs, prepared, services, force, fail_fast, code)
        services.display.say("writing the pages")
    concluded = conclude(list(dict.fromkeys(map(table_of, runs))), outcomes, failures, params, services, smoke)
    if failures:
        raise RunsFailedError(failures, max(len(runs), len(outcomes) + len(failures)), concluded)
    return concluded


def _looked_at(params: Params, spec: RunSpec) -> tuple[str, str | None] | None:
    """Return the first metric with a best value of a run's table on its dataset, and the reference's run name, if the table has one."""
    table = load_table(table_of(spec))
    first = compared_columns(table.flat_columns).get(column_dataset(params, table, spec.dataset))
    if first is None:
        return None
    reference = None
    if table.reference is not None:
        variant = label_parts(spec.variant)[1]
        known = table.rows[table.reference].variants
        reference = run_label(table.reference, variant if variant in known else known[0])
    return table.flat_columns[first].metric, reference


def _prepare(runs: Sequence[RunSpec], params: Params, services: Services, smoke: bool) -> DatasetRecord:
    if not smoke:
        return prepare_checked(runs, params, services)
    dataset = runs[0].dataset.removesuffix(SUFFIX)
    services.display.say(f"generating a few images in the layout of {dataset}")
    record = draw_for_smoke(services.project, dataset)
    check_settings(runs, params.scale, Path(record.folder))
    check_parts(runs, Path(record.folder))
    return record
