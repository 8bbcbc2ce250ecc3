"""Verbs of the papers' tables: list them, show one, export and import its runs; `dml reproduce <table>` runs one."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from flows.cli.app import FirstByDefault, examples, new_group
from flows.cli.columns import Column, print_table
from flows.cli.options import AsJson, check_file
from flows.cli.session import open_project, print_lines
from tasks.wording import counted, duration

if TYPE_CHECKING:
    from tasks.plans.plan import TablePlan
    from tasks.plans.progress import TableState

tables_app = new_group("tables", cls=FirstByDefault)
Name = Annotated[str, typer.Argument(help="Table or figure, for example softtriple/table1.")]


@tables_app.command("list", epilog=examples("dml tables", "dml tables softtriple"))
def list_tables(
    paper: Annotated[
        str | None, typer.Argument(help="List only this paper's tables, for example softtriple; project: the project's own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List tables with their state, and what is missing.

    A table is not run, failed, partly run, done or stale. The time of one seed is estimated from rates measured on this machine. --json has
    the numbers of rows, and everything that is missing.
    """
    project = open_project()
    from tasks.plans.plan import LocalState
    from tasks.plans.progress import table_states
    from tasks.runs.params.file import load_params

    states = table_states(LocalState(project, load_params(project.params_file)), _of_paper(paper))
    if as_json:
        print(json.dumps([_entry(state) for state in states], indent=1))
    else:
        _print_states(states)


def _of_paper(paper: str | None) -> list[str]:
    """Return every table of one paper, or of all."""
    from dml_core.config import unknown_name
    from tasks.runs.tuned import STANDING
    from tasks.tables.file import paper_tables, table_names

    if paper is None:
        return paper_tables()
    names = [name for name in table_names() if name.partition("/")[0] == paper and name != STANDING]  # `dml compare` shows that one
    if not names:
        raise unknown_name("paper", paper, sorted({name.partition("/")[0] for name in table_names()}))
    return names


def _entry(state: "TableState") -> dict[str, Any]:
    rows = state.table.rows.values()
    return {
        "name": state.name,
        "title": state.table.title,
        "page": state.table.page,
        "datasets": list(state.table.datasets),
        "rows": len(rows),
        "can_be_run": sum(row.is_run for row in rows),
        "quoted": sum(row.kind == "quoted" for row in rows),
        "lacks": sorted({row.lacks for row in rows if row.lacks}),
        "state": state.how,
        "own_data": asdict(state.own_data),
        "stand_in": asdict(state.stand_in),
        "needs": [asdict(need) for need in state.plan.needs],
        "seconds": state.plan.estimate.seconds,
        "seconds_from": state.plan.estimate.basis,
    }


def _print_states(states: Sequence["TableState"]) -> None:
    missing = [", ".join(need.what.removeprefix("dataset ") for need in state.plan.needs if need.stops) for state in states]
    times = [_time(state.plan) for state in states]
    print_table(
        Column("table", [state.name for state in states]),
        Column("state", list(map(_how, states)), wraps=True),
        *([Column("missing", missing, drop=1, wraps=True)] if any(missing) else []),
        *([Column("time of a seed", times, drop=2)] if any(times) else []),
        Column("title", [state.table.title for state in states], wraps=True),
    )
    print_lines("dml plan TABLE prints how to get what is missing, and the time; dml tables show TABLE prints values")


def _time(plan: "TablePlan") -> str:
    """Return the time of a seed; "roughly" if it is not measured with these networks and sizes. Empty if nothing is known, or runs."""
    seconds, basis = plan.estimate.seconds, plan.estimate.basis
    return "" if seconds is None or not plan.runs else f"{'about' if basis == 'measured' else 'roughly'} {duration(seconds)}"


def _how(state: "TableState") -> str:
    """Return how much of the table is measured, as `partly, 2 of 5, 1 failed` or `done, 3 seeds`, and how much on stand-ins."""
    own, other = state.own_data, state.stand_in
    numbers = {"done": counted(own.seeds, "seed")} | {
        how: f"{number} of {own.runs}" for how, number in (("failed", own.failed), ("partly", own.done), ("stale", own.stale))
    }
    failed = f"{own.failed} failed" if own.failed and state.how != "failed" else None
    of_own = ", ".join(filter(None, [state.how, numbers.get(state.how), failed]))
    others = [f"{number} {what}" for number, what in ((other.stale, "stale"), (other.failed, "failed")) if number]
    on_stand_in = ", ".join([f"{other.done} of {other.runs}", *others])
    return f"{of_own}; stand-in: {on_stand_in}" if other.done or others else of_own


@tables_app.command(epilog=examples("dml tables show softtriple/table1"))
def show(
    name: Name,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; docs/reference/tables.md describes it.")] = False,
) -> None:
    """Show a table's printed values and those measured so far."""
    project = open_project()
    from tasks.plans.results import load_result
    from tasks.reports.table_text import STAND_IN, TERMINAL, UNRESOLVED, claim_lines, conclusion_lines, count_lines, lines, remark_lines
    from tasks.runs.params.file import load_params
    from tasks.tables.file import load_table
    from tasks.tables.present import table_today
    from tasks.tables.view import shown_table

    table, result = load_table(name), load_result(project, name)
    shown = shown_table(name, table, result, today=table_today(project, load_params(project.params_file), name, table, result))
    if as_json:
        print(shown.model_dump_json(indent=1))
        return
    for line in conclusion_lines(shown):
        print_lines(line)
    page = f", page {shown.page}" if shown.page is not None else ""
    rows, values, *measured = ((title, list(map(Text.from_ansi, texts))) for title, *texts in zip(*lines(shown, TERMINAL), strict=True))
    others = [
        Column(title, texts, drop=len(measured) - place if place else None, wraps=True, style="magenta" if STAND_IN in title else "")
        for place, (title, texts) in enumerate(measured)
    ]
    print_table(Column(*rows, wraps=True), Column(*values, wraps=True), *others, title=f"{name}{page}: {shown.title}")
    print_lines(f"The paper: {shown.states}" if shown.page is not None else shown.states)
    unresolved = [f"{UNRESOLVED}: {line}" for line in shown.unresolved]
    for line in (*remark_lines(shown), *count_lines(shown), *claim_lines(shown), *unresolved, *shown.left_out):
        print_lines(f"- {line}")


@tables_app.command(epilog=examples("dml tables export project/glyphs -o glyphs.json"))
def export(
    name: Name,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write; an earlier export is replaced.")],
) -> None:
    """Write a table's measured runs to a file for another project.

    The file has scores and settings, no networks and pictures.
    """
    check_file(output)
    project = open_project()
    from tasks.plans.results import export_result

    num_runs = len(export_result(project, name, output).runs)
    print_lines(f"{name}: {counted(num_runs, 'run')} in {output}; add them to another project with: dml tables import {output}")


@tables_app.command("import", epilog=examples("dml tables import glyphs.json", "dml tables import seeds-0-4.json seeds-5-9.json"))
def import_runs(files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files that dml tables export wrote.")]) -> None:
    """Add runs that another project measured to this project's tables.

    Use it to share the seeds of a table between machines without a common store. Runs measured here with the
    present settings, data and code are kept, and dml reproduce reuses the imported ones, except with --seeds auto. The table names runs
    with other settings or data and leaves them out of its means; those with former settings are shown where no run has the present ones.
    Such runs replace no others than imported ones like them.
    """
    project = open_project()
    from tasks.plans.results import import_result

    for path in files:
        print_lines(import_result(project, path))
