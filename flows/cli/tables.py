"""Verbs of the papers' tables: list them, show one; `dml reproduce <table>` runs one."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.app import open_project, prefect_starting, print_table, tables_app

if TYPE_CHECKING:
    from tasks.runs.made import Code

Name = Annotated[str, typer.Argument(help="Table or figure, as softtriple/table1.")]


@tables_app.callback(invoke_without_command=True)
def tables(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the tables and figures of the five papers."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from tasks.tables.file import load_table, table_names
    from tasks.tables.runs import datasets_of, is_run

    entries: list[dict[str, Any]] = []
    for name in table_names():
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
def show(name: Name) -> None:
    """Show what a table printed and what was measured of it.

    The measured figures are those of the runs that MLflow has.
    """
    project = open_project()
    from rich.table import Table

    from dml_core.errors import TrackingError
    from tasks.runs.specs import load_params, table_comparison
    from tasks.tables.file import load_table
    from tasks.tables.report import lines
    from tasks.tables.runs import datasets_of
    from tasks.tracking.published import plain_name, published_runs

    table, params = load_table(name), load_params(project.params_file)
    measured: dict[tuple[str, str], list[dict[str, float]]] = {}
    for dataset in datasets_of(table):
        for own in [own for own, spec in params.datasets.items() if spec.reader == dataset]:
            try:
                runs = published_runs(project.tracking_uri, own, table_comparison(name, own))
            except TrackingError:
                continue  # nothing of it was run, or MLflow is away: the published figures stand all the same
            for run in runs:
                scores = {plain_name(metric).removeprefix("detail/"): value for metric, value in run.metrics.items()}
                measured.setdefault((run.variant, dataset), []).append(scores)
    header, *rows = lines(table, measured)
    shown = Table(*header, title=f"{name}, page {table.page}: {table.title}")
    for row in rows:
        shown.add_row(*row)
    print_table(shown)
    print(f"The paper: {table.states}")


def run_table(
    name: str,
    rows: "list[str] | None",
    datasets: "list[str] | None",
    variants: "list[str] | None",
    seeds: "list[int] | None",
    smoke: bool,
    force: bool,
    fail_fast: bool,
    code: "Code" = "strict",
) -> None:
    """Run a table's rows, and print it with what was measured: `dml reproduce <table>`."""
    project = open_project()
    from dml_core.errors import ConfigError
    from tasks.checks import check_before, check_parts, check_places
    from tasks.runs.specs import load_params
    from tasks.tables.runs import table_runs

    if variants and len(variants) > 1:
        raise ConfigError(f"--variant: a table runs in one variant at a time, as as_released; {len(variants)} were given")
    variant = variants[0] if variants else None
    params = load_params(project.params_file)
    typer.echo(f"dml reproduce: checking the rows of {name}", err=True)
    runs = table_runs(params, name, rows, datasets, variant, seeds, smoke)
    for found in runs.values():
        check_parts(found, None if smoke else check_before(project, params, found))
    for note in check_places(project):
        typer.echo(f"note: {note}", err=True)
    num_runs = sum(map(len, runs.values()))
    typer.echo(f"{name}: {num_runs} run{'s' if num_runs > 1 else ''} on {', '.join(runs)}", err=True)
    typer.echo("starting Prefect and loading the libraries (about 15 s)", err=True)
    with prefect_starting():
        from flows.outcomes import RunsFailedError
        from flows.table import table as flow

    try:
        outcome = flow(name, rows, datasets, variant, seeds, smoke, force, fail_fast, code)
    except RunsFailedError as error:
        print(error.comparisons[0].page)
        raise
    print(outcome.page)
    print(f"page: {outcome.path}")
    if outcome.num_undelivered:
        print(f"{outcome.num_undelivered} records wait for MLflow; deliver them with: dml sync")
