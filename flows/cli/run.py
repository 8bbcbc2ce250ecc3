"""Verbs that train: the standing comparison, a table, a single run."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli.app import app, examples
from flows.cli.columns import print_page
from flows.cli.options import Datasets, MaxSeeds, NumSeeds, ResolvePoints, Rows, Seeds, TrackName, Variants, request_of
from flows.cli.session import PrefectStart, open_project, print_lines, say
from tasks.environment import Project, shown
from tasks.wording import counted

if TYPE_CHECKING:
    from flows.outcomes import Outcome
    from flows.reports import Report
    from flows.request import Request
    from tasks.runs.specs import Params, RunSpec

MANY_RUNS = 200  # the files of so many finished runs take a minute or more to compare
Force = Annotated[bool, typer.Option("--force", help="Run every step again, even if it is finished.")]
CodeOption = Annotated[
    Literal["strict", "keep"],
    typer.Option("--code", help="Steps whose code has changed: strict runs them again, keep reuses and marks the results of other code."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of params.yaml, for example comparison.protocol.num_epochs=3; repeat for several.",
    ),
]


@app.command(epilog=examples("dml reproduce --dataset synthetic --seed 0 --seed 1", "dml reproduce softtriple/table1 --seeds 3"))
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
    """Run the comparison of params.yaml, or tables of the papers.

    Finished work is reused. Settings given with --set form a separate comparison, reported below state/reports.
    """
    request = request_of(
        tables,
        seed,
        seeds,
        variant,
        track=track,
        resolve=resolve,
        max_seeds=max_seeds,
        rows=row,
        datasets=dataset,
        overrides=set_,
        whole=whole,
        smoke=smoke,
        one_row=one_row,
        prepared_only=prepared_only,
        force=force,
        fail_fast=fail_fast,
        code=code,
    )
    project = open_project()
    prefect = PrefectStart(project)
    params, runs = _check("reproduce", project, request, prefect)
    if not runs:
        print_lines("nothing to run: all runs were imported; show them with: dml tables show TABLE")
    else:
        _run(request, project, params, runs, prefect)


@app.command(epilog=examples("dml run synthetic softtriple --seed 3"))
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
    prefect = PrefectStart(project)
    request = request_of(None, [seed], None, [variant], datasets=[dataset], overrides=set_, force=force, code=code)
    _, runs = _check("run", project, request, prefect)
    outcome = None
    if not force:
        from flows.reuse.reused import reused_run

        outcome = reused_run(project, runs[0])
    if outcome is None:
        with prefect.loading():
            from flows.reproduce import run as flow
        outcome = flow(dataset, variant, seed, force, set_, code)
    _print_outcome(outcome, project)


def _run(request: "Request", project: Project, params: "Params", runs: Sequence["RunSpec"], prefect: PrefectStart) -> None:
    """Print the reports of runs: at once if all are finished, else after the flow, even if runs failed."""
    from flows.reuse.reused import reused_reports

    if len(runs) >= MANY_RUNS and not request.force:
        say("dml reproduce: comparing the files of finished runs with their hashes")
    reports = None if request.force or request.until else reused_reports(project, params, runs)
    if reports is not None:
        say(f"{len(runs)} of {counted(len(runs), 'run')} reused")
    else:
        with prefect.loading():
            from flows.outcomes import RunsFailedError
            from flows.reproduce import reproduce as flow
        try:
            reports = flow(request)
        except RunsFailedError as error:
            _print_reports(error.reports, project)
            raise
    _print_reports(reports, project)


def _print_outcome(outcome: "Outcome", project: Project) -> None:
    from tasks.runs.finished import made_by_older_code

    for step, did_run in outcome.ran.items():
        print_lines(f"{step}: {'ran' if did_run else 'reused'}")
    for name, value in outcome.scores.metrics.items():
        print_lines(f"{name:>30}  {value:.4f}")
    if outcome.older_code:
        print_lines(made_by_older_code(outcome.older_code))
    _print_places(outcome)
    _print_mlflow(project, num_waiting=int(not outcome.delivered))


def _check(verb: str, project: Project, request: "Request", prefect: PrefectStart) -> "tuple[Params, list[RunSpec]]":
    """Return the parameters and the runs, checked; print what follows. Prefect starts while the losses and networks are checked."""
    from flows.request import requested_runs
    from tasks.checks import check_places

    say(f"dml {verb}: checking parameters")
    params, runs = requested_runs(project, request, say, prefect.begin)
    for note in check_places(project, params.scale):
        say(f"note: {note}")
    return params, runs


def _print_reports(reports: Sequence["Report"], project: Project) -> None:
    """Print the report of a single table, or one line for each of several; of the standing comparison, the report of each dataset."""
    for report in reports:
        if len(reports) > 1 and not report.best_line:
            print_lines(report.line)
            continue
        links = re.compile(r"^!?\[.*\]\(.*\)\n*", re.MULTILINE)  # to files next to the report
        print_page(links.sub("", report.page).rstrip() + "\n")
        print_lines(f"steps run: {_counts(report, did_run=True)}; reused: {_counts(report, did_run=False)}")
        print_lines(f"report: {report.path}")
        if report.best_line:
            print_lines(report.best_line)
        if report.best is not None:
            _print_places(report.best)
    if reports:
        _print_mlflow(project, sum(report.num_undelivered for report in reports))


def _print_places(outcome: "Outcome") -> None:
    print_lines(f"  network: {outcome.network}")
    print_lines(f"  scores and figures: {outcome.figures}")


def _print_mlflow(project: Project, num_waiting: int) -> None:
    if num_waiting:
        print_lines(f"{counted(num_waiting, 'record')} wait{'s' if num_waiting == 1 else ''} for MLflow; to deliver: dml sync")
    uri = shown(project.tracking_uri)
    where = uri if uri.startswith("http") else "run `dml ui`"
    print_lines(f"runs, curves, galleries and models in MLflow: {where}")


def _counts(report: "Report", did_run: bool) -> str:
    counts = Counter(step for outcome in report.outcomes for step, ran in outcome.ran.items() if ran == did_run)
    return ", ".join(f"{step} {count}" for step, count in counts.items()) or "none"
