"""The verb that writes pages to browse runs: `dml look`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.app import app, open_project


@app.command()
def look(
    what: Annotated[
        str, typer.Argument(metavar="RUN|COMPARISON", help="A run as DATASET/VARIANT[/SEED], or all variants of a dataset as DATASET.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the pages; below results/site/look when none is given.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of a comparison: whose pictures are shown; the first seed when not given.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As in the `dml reproduce` that made it.")
    ] = None,
    map_by: Annotated[Literal["tsne", "pca"], typer.Option("--map", help="How the map is made.")] = "tsne",
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write pages to look at a run or a comparison.

    Worst queries, confused classes, a map, neighbours of any test image. They need no network and no server.
    """
    project = open_project()
    from tasks.reports.look.pages import write_look
    from tasks.reports.look.runs import choose
    from tasks.reports.site.pages import SITE
    from tasks.runs.specs import load_params

    params = load_params(project.params_file, override or ())
    chosen = choose(project, params, what, seed, override or ())
    folder = output or project.root / SITE / "look" / what.strip("/").replace("/", "-")
    page = write_look(project, chosen, params.comparison.reference, folder, map_by, lambda line: print(line, file=sys.stderr))
    for variant in chosen.missing:
        print(f"note: {variant} is not shown: no finished run with seed {chosen.seed}", file=sys.stderr)
    print(page)
    if open_page:
        typer.launch(page.absolute().as_uri())
