"""The verb that writes pages: `dml report`."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.app import app, open_project


@app.command()
def report(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE]...", help="Tables, for example softtriple/table1. Default: all.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the pages. Default: results/site.")] = None,
) -> None:
    """Write the tables as pages for a browser.

    They work offline, without a server. Every run of a table updates its page and the index.
    """
    project = open_project()
    from tasks.reports.table_pages import INDEX, SITE, write_site
    from tasks.runs.specs import load_params
    from tasks.tables.file import load_table, table_names

    names = tables or table_names()
    for name in names:
        load_table(name)
    folder = output or project.root / SITE
    pages = write_site(project, load_params(project.params_file), list(dict.fromkeys(names)), folder)
    for page in pages if tables else ():
        print(page.html)
    print(f"{len(pages)} page{'' if len(pages) == 1 else 's'}; index: {folder / INDEX}")
