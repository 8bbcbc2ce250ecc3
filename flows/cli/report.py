"""Verbs that write pages for a browser: `report` those of tables, `look` those to inspect runs."""

import hashlib
import webbrowser
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.app import app, examples
from flows.cli.options import PriceFile, SameOverrides, check_folder
from flows.cli.session import open_project, print_lines, say
from tasks.runs.params.file import load_params
from tasks.runs.params.set_options import result_settings
from tasks.tables.file import chosen_tables, table_names
from tasks.wording import counted


@app.command(epilog=examples("dml report softtriple/table1 -o pages"))
def report(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="TABLE", help="Tables, for example softtriple/table1 or 'softtriple/*'. Default: all.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the pages. Default: results/site.")] = None,
    prices: PriceFile = None,
) -> None:
    """Write the tables as pages for a browser.

    They work offline, without a server. Every run of a table updates its page and the index.
    """
    if output is not None:
        check_folder(output)
    project = open_project()
    from tasks.plans.prices import read_prices
    from tasks.reports.table_pages import INDEX, SITE, write_site

    names = chosen_tables(tables) if tables else table_names()
    pages = write_site(project, load_params(project.params_file), names, output, read_prices(prices) if prices else None)
    for page in pages if tables else ():
        print_lines(page.html)
    print_lines(f"{counted(len(pages), 'page')}; index: {(output or project.root / SITE) / INDEX}")


@app.command(epilog=examples("dml look synthetic", "dml look synthetic/softtriple/0 -o pages"))
def look(
    what: Annotated[
        str, typer.Argument(metavar="RUN|COMPARISON", help="A run as DATASET/VARIANT[/SEED], or all variants of a dataset as DATASET.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the pages. Default: a folder in results/site/look.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed whose pictures are shown. Default: a run's best, a comparison's first.")
    ] = None,
    override: SameOverrides = None,
    map_by: Annotated[Literal["tsne", "pca"], typer.Option("--map", help="Projection method of the map.")] = "tsne",
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write pages to inspect a run or a comparison.

    They show the worst queries, confused classes, a map of the embeddings and the neighbours of any test image, and work offline, without
    a server.
    """
    if output is not None:
        check_folder(output)
    project = open_project()
    from tasks.reports.finished_runs import choose
    from tasks.reports.run_pages import write_look
    from tasks.reports.table_pages import SITE

    params = load_params(project.params_file, override or ())
    selection = choose(project, params, what, seed, override or ())
    changes = "\n".join(result_settings(override or ()))
    called = [what.strip("/").replace("/", "-"), *([hashlib.sha256(changes.encode()).hexdigest()[:8]] if changes else [])]
    folder = output or project.root / SITE / "look" / "-".join(called)
    page = write_look(project, selection, params.comparison.reference, folder, map_by, say)
    for variant in selection.missing:
        say(f"note: {variant} is not shown: no finished run with seed {selection.seed}")
    print_lines(page)
    if open_page and not webbrowser.open(page.absolute().as_uri()):
        say("note: no browser was found to open it")
