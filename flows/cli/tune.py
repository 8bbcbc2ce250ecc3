"""The verb that searches settings: `dml tune TABLE/ROW`."""

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.app import app, examples
from flows.cli.columns import Column, print_table
from flows.cli.session import PrefectStart, open_project, print_lines, say

if TYPE_CHECKING:
    from flows.tune import Tuned
    from tasks.runs.specs import Params
    from tasks.tuning.search import Search


@app.command(epilog=examples("dml tune project/standing/softtriple --dataset synthetic --trials 8"))
def tune(
    rows: Annotated[list[str], typer.Argument(help="Rows of tables, for example project/standing/softtriple.")],
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", "-d", help="Dataset of the table's columns; repeat for several. Default: all of the row's."),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=2, help="Number of settings to try.")] = 16,
    folds: Annotated[int, typer.Option("--folds", min=2, help="Disjoint parts of the training classes; one is held out in each run.")] = 4,
    parallel: Annotated[int | None, typer.Option("--parallel", min=1, help="Runs at a time. Default: scale.concurrent_runs.")] = None,
    seed: Annotated[int, typer.Option("--seed", "-s", min=0, help="Seed of the search and its runs.")] = 0,
    metric: Annotated[str, typer.Option("--metric", help="Metric to maximise: recall@K, map@r or r_precision.")] = "recall@1",
) -> None:
    """Search a row's settings on folds of the training classes.

    Writes all trials to flows/tables/tuned, and the winner's settings if fresh folds and seeds confirm its gain; prints the command that
    runs them. A search that confirms nothing does not replace what another one of the row confirmed. Rerun the command to resume: finished
    scores are reused.
    """
    project = open_project()
    from tasks.checks import check_places
    from tasks.runs.params.without_effect import unreached_notes
    from tasks.tuning.search import checked_searches

    say(f"dml tune: checking {', '.join(rows)}")
    params, searches = checked_searches(project, rows, dataset or (), folds, seed, metric, parallel)
    unreached = unreached_notes((search.dataset, search.row, search.training) for search in searches)
    for note in (*check_places(project, params.scale), *unreached):
        say(f"note: {note}")
    for search in searches:
        say(f"{search.title}: {', '.join(search.space)}")
    with PrefectStart(project).loading():
        from flows.tune import SearchesFailedError
        from flows.tune import tune as flow

    try:
        searched = flow(rows, dataset, trials, folds, parallel, seed, metric)
    except SearchesFailedError as error:
        for tuned in error.tuned:
            _print_tuned(tuned, params)
        raise
    for tuned in searched:
        _print_tuned(tuned, params)


def _print_tuned(tuned: "Tuned", params: "Params") -> None:
    search = tuned.search
    trial, pairs, score, settings = ((title, values) for title, *values in zip(*tuned.rows, strict=True))
    print_table(Column(*trial), Column(*pairs, drop=1), Column(*score), Column(*settings, wraps=True), title=search.title)
    print_lines(tuned.file.says)
    print_lines(tuned.place)
    if tuned.file.training:
        print_lines(f"run them: {_command(search, params)}")


def _command(search: "Search", params: "Params") -> str:
    """Return the command that runs the settings found, after what has to be set in params.yaml for it."""
    from tasks.runs.params.comparison import row_name
    from tasks.runs.tuned import STANDING, TUNED

    if search.table != STANDING:
        return f"dml reproduce {search.table} --row {search.row} --dataset {search.column} --variant {TUNED}"
    comparison = params.comparison
    variant = next(name for name in comparison.variants if row_name(name) == search.row)
    own, of_dataset = comparison.variants[variant].get(TUNED), comparison.datasets[search.column].get(TUNED, False)
    missing = [f"remove comparison.variants.{variant}.tuned"] * (own is False)
    missing += [f"set comparison.datasets.{search.column}.tuned: true"] * (not own and not of_dataset)
    command = f"dml reproduce --dataset {search.column} --variant {variant}"
    return f"{' and '.join(missing)} in params.yaml, then {command}" if missing else command
