"""What is left of a table's runs when they have ended: its result beside the state, its page, its comparisons in MLflow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from flows.outcomes import Failure, Outcome, measured_run
from flows.services import Services
from tasks.environment import Project
from tasks.files import write_whole
from tasks.locks import alone
from tasks.reports.site.pages import TablePage, write_table
from tasks.runs.records import ComparisonReport
from tasks.runs.specs import Params
from tasks.tables.file import label_parts, load_table
from tasks.tables.result import load_result, save_result
from tasks.tables.runs import column_dataset


@dataclass(frozen=True)
class TableOutcome:
    """What a table's runs came to.

    Attributes:
        page: Markdown; of a smoke run, which rows ran.
        path: where the page is.
        outcomes, failures: its runs; one that another table has too is in both.
        num_undelivered: records that wait in the outbox because MLflow did not take them.
    """

    name: str
    page: str
    path: Path
    outcomes: tuple[Outcome, ...]
    failures: tuple[Failure, ...]
    num_undelivered: int

    @property
    def line(self) -> str:
        """The table in one line."""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"{self.name}: {len(self.outcomes)} run{'' if len(self.outcomes) == 1 else 's'}{failed}; page: {self.path}"


def conclude(
    name: str, outcomes: Sequence[Outcome], failures: Sequence[Failure], params: Params, services: Services, smoke: bool
) -> TableOutcome:
    """Write a table's page; of runs that were no smoke also its result, and what MLflow says of all of them together."""
    num_waiting = 0
    if smoke:
        page = smoke_page(name, outcomes)
    else:
        _keep(name, outcomes, failures, params, services)
        shown = write_table(services.project, params, name)
        num_waiting = _summarise(name, shown, outcomes, services)
        page = shown.markdown
    page = _with_failures(page, failures)
    path = _write(services.project, f"{name}{'-smoke' if smoke else ''}", page)
    num_undelivered = num_waiting + sum(not outcome.delivered for outcome in outcomes)
    return TableOutcome(name, page, path, tuple(outcomes), tuple(failures), num_undelivered)


def smoke_page(name: str, outcomes: Sequence[Outcome]) -> str:
    """Which rows ran. No score: one of drawn images must not be taken for the paper's."""
    rows = [f"| {outcome.spec.variant.removeprefix(f'{name} ')} | {outcome.spec.dataset} | {_took(outcome)} |" for outcome in outcomes]
    return "\n".join([f"# {name}: smoke run", "", "| row | images | training and embedding |", "|---|---|---|", *rows, ""])


def _took(outcome: Outcome) -> str:
    return f"{outcome.seconds:.1f} s" if any(outcome.ran.values()) else "shared with another row, or done before"


def _write(project: Project, name: str, page: str) -> Path:
    path = project.state / "reports" / "tables" / f"{name}.md"
    write_whole(path, page)
    create_markdown_artifact(page, key=f"table-{name.replace('/', '-').replace('_', '-')}", description=name)
    return path


def _summarise(name: str, shown: TablePage, outcomes: Sequence[Outcome], services: Services) -> int:
    """Bring each of the table's comparisons up to date in MLflow, with the table's page; how many have to wait."""
    tags = services.tags | {"paper": name.partition("/")[0], "table": name}
    titles = dict.fromkeys((outcome.spec.comparison, outcome.spec.dataset, outcome.spec.evaluation.role) for outcome in outcomes)
    summaries = [
        ComparisonReport(comparison=title, dataset=dataset, role=role, folder=None, tags=tags, about=shown.note, files=shown.files)
        for title, dataset, role in titles
    ]
    return sum(services.tracker.publish(summary) is None for summary in summaries)


def _keep(name: str, outcomes: Sequence[Outcome], failures: Sequence[Failure], params: Params, services: Services) -> None:
    """Add what was measured to the table's result."""
    table = load_table(name)
    runs = tuple(
        measured_run(outcome, *label_parts(outcome.spec.variant), column_dataset(params, table, outcome.spec.dataset))
        for outcome in outcomes
    )
    failed = {
        f"{failure.spec.variant}, {column_dataset(params, table, failure.spec.dataset)}, seed {failure.spec.seed}": failure.reason
        for failure in failures
    }
    with alone(services.project.state / "tables" / ".lock"):  # another shell may end a part of the same table now
        save_result(services.project, load_result(services.project, name).updated(runs, failed, services.tags.get("git_commit")))


def _with_failures(page: str, failures: Sequence[Failure]) -> str:
    return page if not failures else "\n".join([page, "Not in the table:", "", *(f"- {failure.line}" for failure in failures), ""])
