"""Verbs of the papers' tables: list them, show one; `dml reproduce <table>` runs one."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.app import open_project, prefect_starting, print_table, tables_app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flows.concluding import TableOutcome
    from tasks.runs.made import Code
    from tasks.tables.choice import Choice

Name = Annotated[str, typer.Argument(help="Table or figure, as softtriple/table1.")]

Rows = Annotated[list[str] | None, typer.Option("--row", help="Of tables: this row; repeat for several.")]
NumSeeds = Annotated[int | None, typer.Option("--seeds", "-r", min=1, help="Of tables: this many seeds, from 0.")]
TrackName = Annotated[
    str | None, typer.Option("--track", metavar="paper|common", help="Of tables: as each paper ran it, or every loss alike.")
]


@tables_app.callback(invoke_without_command=True)
def tables(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the tables and figures of the five papers."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from tasks.tables.file import load_table, paper_tables
    from tasks.tables.runs import datasets_of, is_run

    entries: list[dict[str, Any]] = []
    for name in paper_tables():
        table = load_table(name)
        rows = table.rows.values()
        entries.append(
            {
                "name": name,
                "title": table.title,
                "page": table.page,
                "datasets": list(datasets_of(table)),
                "rows": len(rows),
                "can_be_run": sum(map(is_run, rows)),
                "quoted": sum(row.kind == "quoted" for row in rows),
                "lacks": sorted({row.lacks for row in rows if row.lacks}),
            }
        )
    if as_json:
        print(json.dumps(entries, indent=1))
        return
    shown = Table("table", "rows", "run", "quoted", "not yet", "datasets", "what it shows")
    for entry in entries:
        waiting = entry["rows"] - entry["can_be_run"] - entry["quoted"]
        counts = [str(count) for count in (entry["rows"], entry["can_be_run"], entry["quoted"], waiting)]
        shown.add_row(entry["name"], *counts, ", ".join(entry["datasets"]), entry["title"])
    print_table(shown)


@tables_app.command()
def show(
    name: Name,
    as_json: Annotated[bool, typer.Option("--json", help="For programs; docs/tables.md describes it.")] = False,
) -> None:
    """Show what a table printed and what was measured of it so far."""
    project = open_project()
    from rich.table import Table

    from tasks.tables.file import load_table
    from tasks.tables.report import claim_lines, lines
    from tasks.tables.result import load_result
    from tasks.tables.shown import shown_table

    found = shown_table(name, load_table(name), load_result(project, name))
    if as_json:
        print(found.model_dump_json(indent=1))
        return
    header, *rows = lines(found)
    page = f", page {found.page}" if found.page is not None else ""
    shown = Table(*header, title=f"{name}{page}: {found.title}")
    for row in rows:
        shown.add_row(*row)
    print_table(shown)
    print(f"The paper: {found.states}" if found.page is not None else found.states)
    for line in claim_lines(found):
        print(f"- {line}")


def choice_of(
    rows: "list[str] | None",
    datasets: "list[str] | None",
    variants: "list[str] | None",
    track: str | None,
    seeds: "list[int] | None",
    num_seeds: int | None,
    smoke: bool = False,
    prepared_only: bool = False,
) -> "Choice":
    """What narrows tables, as it was given on the command line.

    Raises:
        ConfigError: options that do not go together.
    """
    from dml_core.config import unknown_name
    from dml_core.errors import ConfigError
    from tasks.tables.choice import TRACKS, Choice

    if variants and len(variants) > 1:
        raise ConfigError(f"--variant: a table runs in one variant at a time, as as_released; {len(variants)} were given")
    if seeds and num_seeds:
        raise ConfigError(f"--seed names seeds and --seeds says how many (0 to {num_seeds - 1}): give one of them")
    if track not in (None, *TRACKS):
        raise ConfigError(f"--track: {unknown_name('track', str(track), list(TRACKS))}")
    if track == "common" and variants:
        raise ConfigError("--variant is of a paper's protocol, and --track common has one of its own: give one of them")
    chosen = tuple(seeds or range(num_seeds or 1))
    return Choice(
        tuple(rows or ()), tuple(datasets or ()), variants[0] if variants else None, track or "paper", chosen, smoke, prepared_only
    )


def run_tables(patterns: "list[str]", choice: "Choice", force: bool, fail_fast: bool, code: "Code" = "strict") -> None:
    """Run the rows of tables, and print each with what was measured: `dml reproduce <table>...`."""
    project = open_project()
    from tasks.checks import check_places
    from tasks.runs.specs import load_params
    from tasks.tables.file import chosen_tables, load_table
    from tasks.tables.needs import check_tables
    from tasks.tables.runs import at_scale, chosen_runs

    names = chosen_tables(patterns)
    what = names[0] if len(names) == 1 else f"{len(names)} tables"
    params = at_scale(load_params(project.params_file), map(load_table, names))
    typer.echo(f"dml reproduce: checking the rows of {what}", err=True)
    chosen = chosen_runs(params, names, choice)
    runs = check_tables(project, params, chosen, choice)
    for note in check_places(project):
        typer.echo(f"note: {note}", err=True)
    for name, reasons in chosen.left_out.items():
        typer.echo(f"{name}, left out: {'; '.join(reasons)}", err=True)
    datasets = ", ".join(dict.fromkeys(spec.dataset for spec in runs))
    typer.echo(f"{what}: {len(runs)} run{'s' if len(runs) > 1 else ''} on {datasets}", err=True)
    typer.echo("starting Prefect and loading the libraries (about 15 s)", err=True)
    with prefect_starting():
        from flows.outcomes import RunsFailedError
        from flows.table import table as flow

    narrowing = (list(choice.rows), list(choice.datasets), choice.variant, choice.track, list(choice.seeds))
    try:
        _print_outcomes(flow(names, *narrowing, choice.smoke, choice.prepared_only, force, fail_fast, code))
    except RunsFailedError as error:
        _print_outcomes(error.comparisons)
        raise


def _print_outcomes(outcomes: "Sequence[TableOutcome]") -> None:
    """A table with its page; of several a line each."""
    if len(outcomes) == 1:
        print(f"{outcomes[0].page}\npage: {outcomes[0].path}")
    for outcome in outcomes if len(outcomes) > 1 else ():
        print(outcome.line)
    num_undelivered = sum(outcome.num_undelivered for outcome in outcomes)
    if num_undelivered:
        print(f"{num_undelivered} records wait for MLflow; deliver them with: dml sync")
