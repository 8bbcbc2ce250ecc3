"""The flow of a paper's table: every row that can be run, on its datasets, over seeds, and the table with what was measured.

prepare each dataset (DVC; drawn for --smoke) -> every run's chain (flows/run.py) -> the table beside its published figures
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from flows.choices import TableName
from flows.outcomes import Failure, Outcome, RunsFailedError, finish
from flows.run import STEPS_AT_ONCE, Chain, prepare_checked
from flows.services import Services
from tasks.checks import check_before, check_parts, check_settings
from tasks.environment import open_project
from tasks.runs.made import Code
from tasks.runs.records import ComparisonReport, DatasetRecord
from tasks.runs.specs import Params, RunSpec, load_params
from tasks.tables.file import label_parts, load_table
from tasks.tables.report import as_markdown
from tasks.tables.result import MeasuredRun, load_result, save_result
from tasks.tables.runs import table_runs
from tasks.tables.smoke import draw_for_smoke


@dataclass(frozen=True)
class TableOutcome:
    """What a table's runs came to.

    Attributes:
        page: Markdown; of a smoke run, which rows ran.
        path: where the page is.
        num_undelivered: records that wait in the outbox because MLflow did not take them.
    """

    name: str
    page: str
    path: Path
    outcomes: tuple[Outcome, ...]
    num_undelivered: int


@flow(name="table", flow_run_name="{name}", task_runner=STEPS_AT_ONCE)
def table(
    name: TableName,
    rows: list[str] | None = None,
    datasets: list[str] | None = None,
    variant: str | None = None,
    seeds: list[int] | None = None,
    smoke: bool = False,
    force: bool = False,
    fail_fast: bool = False,
    code: Code = "strict",
) -> TableOutcome:
    """Run a table or figure of a paper; steps that are done already, for this or another table, are reused.

    Args:
        name: as `dml tables` lists it.
        rows, datasets: narrow the table.
        variant: of the paper's protocol, as `as_released`, for every row that has it.
        seeds: every row runs once with each; 0 when none is given.
        smoke: the same systems on a few drawn images, for one epoch; says that the chain runs and nothing of the paper.
        force: run every step again.
        fail_fast: stop when a run fails; otherwise the others go on.
        code: "strict" to run again what changed code made, "keep" to reuse and mark it.
    """
    project = open_project()
    params = load_params(project.params_file)
    file = load_table(name)
    runs = table_runs(params, name, rows, datasets, variant, seeds, smoke)
    for found in runs.values():
        check_parts(found, None if smoke else check_before(project, params, found))
    with closing(Services(project, params.scale)) as services:
        prepared = {dataset: _prepare(dataset, found, params, services, smoke) for dataset, found in runs.items()}
        published = {dataset: services.tracker.published(found[0].comparison) for dataset, found in runs.items()}
        chains = [
            Chain(spec, prepared[dataset], services, force, published[dataset], code) for dataset, found in runs.items() for spec in found
        ]
        services.announce(len(chains), sum(chain.must_train for chain in chains))
        outcomes, failures = finish(chains, services, fail_fast)
        summaries = [
            ComparisonReport(comparison=title, dataset=dataset, role="test", folder=None, tags=services.tags)
            for title, dataset in dict.fromkeys((outcome.spec.comparison, outcome.spec.dataset) for outcome in outcomes)
        ]
        num_waiting = sum(services.tracker.publish(summary) is None for summary in summaries)
    if not smoke:
        _keep(name, outcomes, failures, params, services)
    page = _smoke_page(name, outcomes) if smoke else as_markdown(name, file, _measured(outcomes, params))
    page = _with_failures(page, failures)
    path = project.state / "reports" / "tables" / f"{name}{'-smoke' if smoke else ''}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    create_markdown_artifact(page, key=f"table-{name.replace('/', '-').replace('_', '-')}", description=name)
    num_undelivered = num_waiting + sum(not outcome.delivered for outcome in outcomes)
    result = TableOutcome(name, page, path, tuple(outcomes), num_undelivered)
    if failures:
        raise RunsFailedError(failures, len(chains), [result])
    return result


def _prepare(dataset: str, runs: Sequence[RunSpec], params: Params, services: Services, smoke: bool) -> DatasetRecord:
    if not smoke:
        return prepare_checked(runs, params, services)
    services.display.say(f"drawing a few images in the layout of {dataset}")
    record = draw_for_smoke(services.project, dataset)
    check_settings(runs, params.scale, Path(record.folder))
    check_parts(runs, Path(record.folder))
    return record


def _keep(name: str, outcomes: Sequence[Outcome], failures: Sequence[Failure], params: Params, services: Services) -> None:
    """Add what was measured to the table's result."""
    runs = tuple(
        MeasuredRun(
            row=label_parts(outcome.spec.variant)[0],
            variant=label_parts(outcome.spec.variant)[1],
            epoch=outcome.spec.evaluation.epoch,
            dataset=params.datasets[outcome.spec.dataset].reader,
            project_dataset=outcome.spec.dataset,
            seed=outcome.spec.seed,
            identity=outcome.scores.identity,
            scores=outcome.scores.metrics,
            figures=outcome.scores.key,
            training=outcome.spec.training.model_dump(mode="json"),
            evaluation=outcome.spec.evaluation.model_dump(mode="json"),
            seconds=outcome.seconds or None,
            older_code=outcome.older_code,
        )
        for outcome in outcomes
    )
    failed = {
        f"{failure.spec.variant}, {params.datasets[failure.spec.dataset].reader}, seed {failure.spec.seed}": failure.reason
        for failure in failures
    }
    save_result(services.project, load_result(services.project, name).updated(runs, failed, services.tags.get("git_commit")))


def _measured(outcomes: Sequence[Outcome], params: Params) -> dict[tuple[str, str], list[dict[str, float]]]:
    """(row and variant, the columns' dataset) -> the scores of each seed."""
    found: defaultdict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.spec.variant, params.datasets[outcome.spec.dataset].reader].append(outcome.scores.metrics)
    return dict(found)


def _smoke_page(name: str, outcomes: Sequence[Outcome]) -> str:
    """Which rows ran. No score: one of drawn images must not be taken for the paper's."""
    rows = [f"| {outcome.spec.variant} | {outcome.spec.dataset} | {outcome.seconds:.0f} s |" for outcome in outcomes]
    return "\n".join([f"# {name}: smoke run", "", "| row | images | training |", "|---|---|---|", *rows, ""])


def _with_failures(page: str, failures: Sequence[Failure]) -> str:
    return page if not failures else "\n".join([page, "Not in the table:", "", *(f"- {failure.line}" for failure in failures), ""])
