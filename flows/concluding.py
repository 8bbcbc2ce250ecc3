"""The end of a flow of tables: their results, their pages and their comparisons in MLflow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from flows.outcomes import Failure, Outcome, measured_run
from flows.services import Services
from tasks.environment import Project
from tasks.files import write_whole
from tasks.plans.results import add_runs, load_result
from tasks.reports.table_pages import TablePage, write_site
from tasks.runs.records import ComparisonReport
from tasks.runs.specs import Params
from tasks.tables.file import label_parts, load_table
from tasks.tables.present import table_today
from tasks.tables.runs import column_dataset
from tasks.tables.smoke import table_of


@dataclass(frozen=True)
class TableOutcome:
    """The results of a table's runs.

    Attributes:
        page: Markdown; for a smoke run, the rows that ran.
        path: path of the page.
        outcomes, failures: its runs; a run shared by two tables is in both.
        num_undelivered: records that wait in the outbox because MLflow did not accept them.
    """

    name: str
    page: str
    path: Path
    outcomes: tuple[Outcome, ...]
    failures: tuple[Failure, ...]
    num_undelivered: int

    @property
    def line(self) -> str:
        """The table as one line."""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"{self.name}: {len(self.outcomes)} run{'' if len(self.outcomes) == 1 else 's'}{failed}; page: {self.path}"


def conclude(
    names: Sequence[str],
    outcomes: Sequence[Outcome],
    failures: Sequence[Failure],
    params: Params,
    services: Services,
    smoke: bool,
) -> list[TableOutcome]:
    """Write the results and pages of tables whose runs have ended, and update their comparisons in MLflow.

    The pages are written together, so that the index of all tables is written once. This needs no workers: close the services first.

    Args:
        names: tables.
        outcomes, failures: all their runs.
        params: parameters of the project.
        services: services of the flow.
        smoke: a smoke run writes no result and nothing to MLflow.
    """
    own_outcomes = {name: [outcome for outcome in outcomes if table_of(outcome.spec) == name] for name in names}
    own_failures = {name: [failure for failure in failures if table_of(failure.spec) == name] for name in names}
    if smoke:
        pages = {name: smoke_page(name, own_outcomes[name]) for name in names}
        num_waiting = dict.fromkeys(names, 0)
    else:
        for name in names:
            _keep(name, own_outcomes[name], own_failures[name], params, services)
        written = dict(zip(names, write_site(services.project, params, names), strict=True))
        pages = {name: page.markdown for name, page in written.items()}
        num_waiting = {name: _summarise(name, page, own_outcomes[name], params, services) for name, page in written.items()}
    concluded = []
    for name in names:
        page = _with_failures(pages[name], own_failures[name])
        path = _write(services.project, f"{name}{'-smoke' if smoke else ''}", page)
        num_undelivered = num_waiting[name] + sum(not outcome.delivered for outcome in own_outcomes[name])
        concluded.append(TableOutcome(name, page, path, tuple(own_outcomes[name]), tuple(own_failures[name]), num_undelivered))
    return concluded


def smoke_page(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return a page with the rows that ran. It has no scores: those of drawn images must not be taken for the paper's."""
    rows = [f"| {outcome.spec.variant.removeprefix(f'{name} ')} | {outcome.spec.dataset} | {_took(outcome)} |" for outcome in outcomes]
    return "\n".join([f"# {name}: smoke run", "", "| row | images | training and embedding |", "|---|---|---|", *rows, ""])


def _took(outcome: Outcome) -> str:
    return f"{outcome.seconds:.1f} s" if any(outcome.ran.values()) else "shared with another row, or done before"


def _write(project: Project, name: str, page: str) -> Path:
    path = project.state / "reports" / "tables" / f"{name}.md"
    write_whole(path, page)
    create_markdown_artifact(page, key=f"table-{name.replace('/', '-').replace('_', '-')}", description=name)
    return path


def _summarise(name: str, shown: TablePage, outcomes: Sequence[Outcome], params: Params, services: Services) -> int:
    """Update each of the table's comparisons in MLflow, with the table's page; return the number that must wait."""
    tags = services.tags | {"paper": name.partition("/")[0], "table": name}
    table = load_table(name)
    today = table_today(services.project, params, name, table, load_result(services.project, name))
    first: dict[str, Outcome] = {}
    for outcome in outcomes:
        first.setdefault(outcome.spec.comparison, outcome)
    summaries = []
    for title, outcome in first.items():
        column = column_dataset(params, table, outcome.spec.dataset)
        settings = {label: found for (dataset, label), found in today.settings.items() if dataset == column}
        summaries.append(
            ComparisonReport(
                comparison=title,
                dataset=outcome.spec.dataset,
                role=outcome.spec.evaluation.role,
                folder=None,
                tags=tags,
                about=shown.note,
                files=shown.files,
                digest=outcome.digest,
                settings=settings,
            )
        )
    return sum(services.tracker.publish(summary) is None for summary in summaries)


def _keep(name: str, outcomes: Sequence[Outcome], failures: Sequence[Failure], params: Params, services: Services) -> None:
    """Add the measured runs to the table's result."""
    table = load_table(name)
    runs = tuple(
        measured_run(outcome, *label_parts(outcome.spec.variant), column_dataset(params, table, outcome.spec.dataset))
        for outcome in outcomes
    )
    failed = {
        f"{failure.spec.variant}, {column_dataset(params, table, failure.spec.dataset)}, seed {failure.spec.seed}": failure.reason
        for failure in failures
    }
    add_runs(services.project, name, runs, failed, services.tags.get("git_commit"))


def _with_failures(page: str, failures: Sequence[Failure]) -> str:
    return page if not failures else "\n".join([page, "Not in the table:", "", *(f"- {failure.line}" for failure in failures), ""])
