"""Verbs that train: the standing comparison, a table, a single run."""

import re
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli.app import app
from flows.cli.session import open_project, prefect_starting
from flows.cli.table_options import AUTO, MaxSeeds, NumSeeds, ResolvePoints, Rows, TrackName, resolving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flows.outcomes import Outcome
    from flows.reproduce import Comparison
    from tasks.environment import Project

STANDING = "project/standing"  # the table run by `dml reproduce` without arguments
Datasets = Annotated[list[str] | None, typer.Option("--dataset", "-d", help="Dataset of the comparison; repeat for several.")]
Variants = Annotated[list[str] | None, typer.Option("--variant", "-v", help="Variant of the comparison; repeat for several.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", "-s", help="Seed; repeat for several.")]
Force = Annotated[bool, typer.Option("--force", help="Run every step again, even if it is finished.")]
CodeOption = Annotated[
    Literal["strict", "keep"],
    typer.Option("--code", help="Steps whose code has changed: strict runs them again, keep reuses and marks the results of older code."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of params.yaml, for example comparison.protocol.num_epochs=3; repeat for several.",
    ),
]


@app.command()
def reproduce(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Papers' tables or figures, for example softtriple/table1 or 'softtriple/*'; `dml tables` lists them."),
    ] = None,
    dataset: Datasets = None,
    variant: Variants = None,
    seed: Seeds = None,
    force: Force = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop when a run fails; by default the others continue.")] = False,
    set_: Overrides = None,
    row: Rows = None,
    seeds: NumSeeds = None,
    resolve: ResolvePoints = None,
    max_seeds: MaxSeeds = None,
    track: TrackName = None,
    prepared_only: Annotated[bool, typer.Option("--prepared-only", help="For tables: run only on prepared datasets.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="For tables: test the whole chain with a few generated images and one epoch.")
    ] = False,
    one_row: Annotated[bool, typer.Option("--one-row", help="With --smoke: one run per table.")] = False,
    code: CodeOption = "strict",
    whole: Annotated[
        bool, typer.Option("--all", help="Run all variants and seeds of params.yaml, not only the default ones; reported in results/.")
    ] = False,
) -> None:
    """Run the standing comparison, or tables of the papers.

    Finished work is reused. Settings given with --set form a separate comparison, reported below state/reports.
    """
    from dml_core.errors import ConfigError
    from tasks.tables.seeds_auto import FIRST_SEEDS

    until = resolving(seeds, resolve, max_seeds, smoke)
    if tables and tables != [STANDING]:
        from flows.cli.table_options import choice_of
        from flows.cli.tables import run_tables

        if set_:
            raise ConfigError("--set applies only to the standing comparison; a table's settings are in its file")
        if whole:
            raise ConfigError(
                "--all applies only to the standing comparison; a table always runs all of its rows, and --seeds sets the number of seeds"
            )
        choice = choice_of(row, dataset, variant, track, seed, seeds, smoke, prepared_only, one_row)
        return run_tables(tables, choice, force, fail_fast, code, until)
    if row or smoke or track or prepared_only or one_row or seeds not in (None, AUTO):
        raise ConfigError(
            "--row, --seeds N, --track, --prepared-only and --smoke require a table, for example: dml reproduce softtriple/table1 --smoke"
        )
    if seed and until:
        raise ConfigError(
            "--seed cannot be combined with --seeds auto, which adds seeds until differences are precise enough; give one of them"
        )
    project = open_project()
    _say("dml reproduce: checking parameters")
    _check(project, dataset, variant, range(FIRST_SEEDS) if until else seed, set_, whole)
    with prefect_starting():
        from flows.outcomes import RunsFailedError
        from flows.reproduce import reproduce as flow

    try:
        points, most = (None, None) if until is None else (until.points, until.most)
        _print_comparisons(flow(dataset, variant, seed, force, fail_fast, set_, code, points, most, whole=whole), project)
    except RunsFailedError as error:
        _print_comparisons(error.comparisons, project)
        raise


@app.command()
def run(
    dataset: Annotated[str, typer.Argument(help="Dataset of the comparison.")],
    variant: Annotated[str, typer.Argument(help="Variant of the comparison.")],
    seed: Annotated[int, typer.Option("--seed", "-s", help="Seed.")] = 0,
    force: Force = False,
    set_: Overrides = None,
    code: CodeOption = "strict",
) -> None:
    """Run one variant on one dataset with one seed.

    Finished work is reused.
    """
    project = open_project()
    _say("dml run: checking parameters")
    _check(project, [dataset], [variant], [seed], set_)
    with prefect_starting():
        from flows.run import run as flow
        from tasks.runs.finished import made_by_older_code

    outcome = flow(dataset, variant, seed, force, set_, code)
    for step, did_run in outcome.ran.items():
        print(f"{step}: {'ran' if did_run else 'reused'}")
    for name, value in outcome.scores.metrics.items():
        print(f"{name:>30}  {value:.4f}")
    if outcome.older_code:
        print(made_by_older_code(outcome.older_code))
    _print_places(outcome)
    _print_mlflow(project)


def _say(text: str) -> None:
    """Print a line on standard error at once."""
    typer.echo(text, err=True)


def _check(
    project: "Project",
    datasets: "Sequence[str] | None",
    variants: "Sequence[str] | None",
    seeds: "Sequence[int] | None",
    overrides: "Sequence[str] | None",
    whole: bool = False,
) -> None:
    """Check the runs before anything heavy is loaded or started, and print what follows."""
    from tasks.checks import check_before, check_parts, check_places
    from tasks.runs.specs import load_params, standing_runs

    params = load_params(project.params_file, overrides or ())
    runs = standing_runs(params, datasets, variants, seeds, overrides or (), whole)
    packed = {name: check_before(project, params, runs[name]) for name in runs}
    for note in check_places(project):
        _say(f"note: {note}")
    for found in runs.values():
        num_variants, num_seeds = (len({getattr(spec, kind) for spec in found}) for kind in ("variant", "seed"))
        _say(f"{found[0].comparison}: {_number(num_variants, 'variant')}, {_number(num_seeds, 'seed')}, {_number(len(found), 'run')}")
    _say("checking losses and networks")
    for name, found in runs.items():
        check_parts(found, packed[name])
    _say("starting Prefect and loading the libraries (about 15 s)")


def _print_comparisons(comparisons: "Sequence[Comparison]", project: "Project") -> None:
    for comparison in comparisons:
        links = re.compile(r"^!?\[.*\]\(.*\)\n*", re.MULTILINE)  # to files next to the report
        print(links.sub("", comparison.report).rstrip() + "\n")
        print(f"steps run: {_counts(comparison.ran)}; reused: {_counts(comparison.reused)}")
        print(f"report: {comparison.folder / 'report.md'}")
        print(comparison.best_line)
        if comparison.best is not None:
            _print_places(comparison.best)
        if comparison.num_undelivered:
            print(f"{comparison.num_undelivered} records wait for MLflow; deliver them with: dml sync")
    if comparisons:
        _print_mlflow(project)


def _print_places(outcome: "Outcome") -> None:
    print(f"  network: {outcome.network}")
    print(f"  scores and figures: {outcome.figures}")


def _print_mlflow(project: "Project") -> None:
    from tasks.environment import shown

    uri = shown(project.tracking_uri)
    where = uri if uri.startswith("http") else "run `make ui` (or `dml ui`) and open http://127.0.0.1:5000"
    print(f"runs, curves, galleries and models in MLflow: {where}")


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{step} {count}" for step, count in counts.items()) or "none"
