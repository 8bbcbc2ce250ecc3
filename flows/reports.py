"""The end of a flow: results, pages and MLflow's comparisons, of tables and of the standing comparison."""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.backends import Backends
from flows.outcomes import Failure, Outcome
from tasks.environment import Project
from tasks.files import write_whole
from tasks.locks import alone
from tasks.plans.results import add_runs, load_result
from tasks.reports.compare import REPORT_FILE, write_report
from tasks.reports.table_pages import TablePage, write_site
from tasks.runs.best import VALIDATION, best_run, said_best
from tasks.runs.comparable import scores_by_seed, standing_today
from tasks.runs.params.comparison import is_whole, row_name
from tasks.runs.records import ComparisonReport
from tasks.runs.specs import Params, RunSpec
from tasks.runs.tuned import STANDING
from tasks.tables.file import load_table
from tasks.tables.present import table_today
from tasks.tables.result import FailedRun, MeasuredRun
from tasks.wording import counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """The report of a table's runs, or of the standing comparison's runs on one dataset.

    Attributes:
        title: name of the table, or title of the comparison in MLflow.
        key: its name on Prefect's pages.
        page: Markdown with the results, and with the failed runs; for a smoke run, the rows that ran.
        path: path of the page.
        outcomes, failures: its runs; a run shared by two tables is in both.
        num_undelivered: records that wait in the outbox because MLflow did not accept them.
        best: of the standing comparison, the best of its runs (`tasks.runs.best`); None if none has a validation score.
        best_line: which of its runs is best and by which rule, or why there is none; empty for a table.
    """

    title: str
    key: str
    page: str
    path: Path
    outcomes: tuple[Outcome, ...]
    failures: tuple[Failure, ...]
    num_undelivered: int
    best: Outcome | None = None
    best_line: str = ""

    @classmethod
    def of_standing(
        cls, outcomes: Sequence[Outcome], failures: Sequence[Failure], page: str, path: Path, num_undelivered: int = 0
    ) -> "Report":
        """Return the report of the standing comparison's runs on one dataset, whose page is written."""
        runs = {(outcome.spec.variant, outcome.spec.seed): outcome for outcome in outcomes if VALIDATION in outcome.scores.metrics}
        scores = scores_by_seed((*place, outcome.scores.metrics[VALIDATION]) for place, outcome in runs.items())
        found, spec = best_run(scores), outcomes[0].spec
        best = None if found is None else runs[found.variant, found.seed]
        key = artifact_key("comparison", spec.dataset)
        best_line = re.sub("^best run:", "best of these runs:", said_best(scores))  # others, as of other variants, may be better
        return cls(spec.comparison, key, page, path, tuple(outcomes), tuple(failures), num_undelivered, best, best_line)

    @property
    def line(self) -> str:
        """The report as one line."""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"{self.title}: {counted(len(self.outcomes), 'run')}{failed}; page: {self.path}"


def write_reports(
    runs: Sequence[RunSpec], outcomes: Sequence[Outcome], failures: Sequence[Failure], params: Params, backends: Backends
) -> list[Report]:
    """Write the results and pages of runs that have ended, and update their comparisons in MLflow. Close a flow's services first.

    Args:
        runs: the requested runs, all of tables or all of the standing comparison.
        params: parameters of the project, with the overrides of the runs.
    """
    _add_results(outcomes, failures, backends)
    if runs[0].table is not None:
        return _report_tables(runs, outcomes, failures, params, backends)
    reports = []
    for dataset in dict.fromkeys(spec.dataset for spec in runs):
        ran = [outcome for outcome in outcomes if outcome.spec.dataset == dataset]
        if ran:
            failed = [failure for failure in failures if failure.spec.dataset == dataset]
            reports.append(report_standing(ran, failed, params, backends))
    return reports


def _report_tables(
    runs: Sequence[RunSpec], outcomes: Sequence[Outcome], failures: Sequence[Failure], params: Params, backends: Backends
) -> list[Report]:
    """Write the results and pages of tables, all together, so that the index of all tables is written once."""
    names, is_smoke = list(dict.fromkeys(str(spec.table) for spec in runs)), runs[0].is_smoke
    site = {} if is_smoke else dict(zip(names, write_site(backends.project, params, names), strict=True))
    reports = []
    for name in names:
        ran = tuple(outcome for outcome in outcomes if outcome.spec.table == name)
        failed = tuple(failure for failure in failures if failure.spec.table == name)
        page = _with_failures(smoke_page(name, ran), failed) if is_smoke else site[name].markdown  # with the failures
        num_waiting = sum(not outcome.delivered for outcome in ran)
        num_waiting += 0 if is_smoke else _publish_table(name, site[name], ran, params, backends)
        path = backends.project.state / "reports" / "tables" / f"{name}{'-smoke' if is_smoke else ''}.md"
        write_whole(path, page)
        reports.append(Report(name, artifact_key("table", name), page, path, ran, failed, num_waiting))
    return reports


def artifact_key(kind: str, name: str) -> str:
    """Return the key of a page in Prefect, which allows lower-case letters, digits and dashes."""
    return re.sub("[^a-z0-9]", "-", f"{kind}-{name}".lower())


def smoke_page(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return a page with the rows that ran. It has no scores: those of drawn images must not be taken for the paper's."""
    rows = []
    for outcome in outcomes:
        took = f"{outcome.seconds:.1f} s" if any(outcome.ran.values()) else "shared with another row, or done before"
        rows.append(f"| {outcome.spec.label.removeprefix(f'{name} ')} | {outcome.spec.dataset} | {took} |")
    return "\n".join([f"# {name}: smoke run", "", "| row | images | training and embedding |", "|---|---|---|", *rows, ""])


def _with_failures(page: str, failures: Sequence[Failure]) -> str:
    return page if not failures else "\n".join([page, "Not in the table:", "", *(f"- {failure.line}" for failure in failures), ""])


def add_ended(outcomes: Sequence[Outcome], failures: Sequence[Failure], backends: Backends) -> None:
    """Add runs that have ended to the results of their tables while others run. An error is logged, and `write_reports` adds them again."""
    try:
        _add_results(outcomes, failures, backends)
    except Exception as error:  # noqa: BLE001 - the other runs continue
        logger.warning("results not added to their tables before the end of the flow: %s", error)


def _add_results(outcomes: Sequence[Outcome], failures: Sequence[Failure], backends: Backends) -> None:
    """Add runs to the results of their tables, from which pages are written. Those of which no step ran keep their commits."""
    commit = backends.tags.get("git_commit")
    specs = [outcome.spec for outcome in outcomes] + [failure.spec for failure in failures]
    for table in dict.fromkeys(map(_table_of, specs)):
        if table is None:
            continue
        ran = [outcome for outcome in outcomes if _table_of(outcome.spec) == table]
        runs = [MeasuredRun.of(one.spec, one.scores, one.digest, one.training_seconds, one.older_code, one.costs, commit) for one in ran]
        reused = {run.place for run, outcome in zip(runs, ran, strict=True) if not any(outcome.ran.values())}
        failed = [FailedRun.of(failure.spec, failure.reason) for failure in failures if _table_of(failure.spec) == table]
        add_runs(backends.project, table, runs, failed, commit, reused)


def _table_of(spec: RunSpec) -> str | None:
    """Return the table that a run's result is added to; none has smoke runs, and runs of the standing comparison with other settings."""
    if spec.is_smoke or (spec.table is None and spec.overrides):
        return None
    return spec.table or STANDING


def _publish_table(name: str, page: TablePage, outcomes: Sequence[Outcome], params: Params, backends: Backends) -> int:
    """Update each of the table's comparisons in MLflow, with the table's page; return the number that must wait."""
    tags = backends.tags | {"paper": name.partition("/")[0], "table": name}
    today = table_today(backends.project, params, name, load_table(name), load_result(backends.project, name))
    first: dict[str, Outcome] = {}
    for outcome in outcomes:
        first.setdefault(outcome.spec.comparison, outcome)
    reports = [
        ComparisonReport(
            comparison=title,
            dataset=outcome.spec.dataset,
            role=outcome.spec.evaluation.role,
            folder=None,
            tags=tags,
            about=page.note,
            files=tuple(map(str, page.files)),
            digest=outcome.digest,
            settings={label: settings for (column, label), settings in today.settings.items() if column == outcome.spec.column},
        )
        for title, outcome in first.items()
    ]
    return sum(backends.tracker.publish(report) is None for report in reports)


def report_folder(project: Project, runs: Sequence[RunSpec], is_part: bool) -> Path:
    """Return a comparison's report folder: `results/<dataset>` for the whole standing comparison, else a folder for the selection.

    Different selections of variants, seeds or settings have different folders, and equal ones the same.
    """
    first = runs[0]
    if not is_part and not first.overrides:
        return project.results(first.dataset)
    variants, seeds = sorted({spec.variant for spec in runs}), sorted({spec.seed for spec in runs})
    selection = json.dumps([{"variant": variants, "seed": seeds}, first.comparison])
    identity = hashlib.sha256(selection.encode()).hexdigest()[:8]
    of_variants = variants[0] if len(variants) == 1 else f"{len(variants)}-variants"
    of_seeds = f"seed-{seeds[0]}" if len(seeds) == 1 else f"{len(seeds)}-seeds"
    return project.state / "reports" / first.dataset / f"{row_name(of_variants)[:40]}-{of_seeds}-{identity}"


def last_upload(project: Project, comparison: str) -> Path:
    """Return the file that names the report folder that MLflow has of a comparison: that of the last command, of all its runs or a part."""
    return project.state / "reports" / ".written" / f"{hashlib.sha256(comparison.encode()).hexdigest()[:16]}.folder"


def report_standing(outcomes: Sequence[Outcome], failures: Sequence[Failure], params: Params, backends: Backends) -> Report:
    """Write the report of the standing comparison's runs on one dataset: files, MLflow.

    Only a whole standing comparison is reported in `results/`; a part of one, or one with other settings, has a separate folder.
    """
    spec, project, reference = outcomes[0].spec, backends.project, params.comparison.reference
    is_part = bool(failures) or not is_whole(params, (outcome.spec for outcome in outcomes))
    folder = report_folder(project, [*(outcome.spec for outcome in outcomes), *(failure.spec for failure in failures)], is_part)
    older_code = {
        variant: sorted({file for outcome in outcomes if outcome.spec.variant == variant for file in outcome.older_code})
        for variant in dict.fromkeys(outcome.spec.variant for outcome in outcomes if outcome.older_code)
    }
    with alone(project.state / "reports" / f".{folder.parent.name}-{folder.name}.lock"):  # another shell may report the same selection now
        report = write_report(spec.comparison, [(outcome.spec, outcome.scores) for outcome in outcomes], folder, older_code, reference)
        page = _with_failures(report, failures)
        if failures:
            write_whole(folder / REPORT_FILE, page)
    today = standing_today(params, spec.dataset, outcomes[0].digest, spec.overrides)
    summary = ComparisonReport(
        comparison=spec.comparison,
        dataset=spec.dataset,
        role=spec.evaluation.role,
        folder=str(folder),
        tags=backends.tags,
        reference=reference,
        digest=outcomes[0].digest,
        settings={variant: settings for (_, variant), settings in today.settings.items()},
        is_one_protocol=today.is_one_protocol,
    )
    write_whole(last_upload(project, spec.comparison), str(folder))
    num_undelivered = sum(not outcome.delivered for outcome in outcomes) + (backends.tracker.publish(summary) is None)
    return Report.of_standing(outcomes, failures, page, folder / REPORT_FILE, num_undelivered)
