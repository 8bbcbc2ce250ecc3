"""Reports of the standing comparison that need not be written again: nothing has changed that they depend on, and they are still there.

Writing them takes seconds, mostly of MLflow's client. They depend on the scores, the parameters, the commit, this program's code, the
local database of MLflow and which report it has. A file with the same size, time of change and inode counts as unchanged. Another
tracking server can change unnoticed, so for it reports are always written.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dml_core.files import json_sha256
from flows.backends import Backends
from flows.outcomes import Outcome
from flows.reports import Report, last_upload
from tasks.environment import Project
from tasks.files import hash_of_states
from tasks.runs.specs import Params
from tasks.runs.tuned import STANDING
from tasks.sealed import read_or_set_aside, write_sealed
from tasks.tables.result import result_path
from tasks.tracking.connection import SQLITE

PACKAGES = [Path(__file__).parents[2] / name for name in ("dml_core", "tasks", "flows")]


_WRITTEN: Any = tuple[str, dict[str, Path]]  # the state that they show, and the title of each comparison with its page


def record_reports(reports: Sequence[Report], outcomes: Sequence[Outcome], params: Params, backends: Backends) -> None:
    """Record that reports of the standing comparison are up to date, unless a run failed, is of older code or waits for MLflow."""
    if not outcomes or outcomes[0].spec.table is not None:
        return
    if any(report.failures or report.num_undelivered for report in reports) or any(outcome.older_code for outcome in outcomes):
        return
    state = _state(outcomes, (report.path for report in reports), params, backends)
    if state is not None:
        write_sealed(_path(backends.project, outcomes), (state, {report.title: report.path for report in reports}))


def written_reports(outcomes: Sequence[Outcome], params: Params, backends: Backends) -> list[Report] | None:
    """Return the reports of these reused runs if they are up to date, or None."""
    state, pages = read_or_set_aside(_path(backends.project, outcomes), _WRITTEN) or (None, {})
    if state is None or state != _state(outcomes, pages.values(), params, backends):
        return None
    of_page = {title: [outcome for outcome in outcomes if outcome.spec.comparison == title] for title in pages}
    return [Report.of_standing(of_page[title], (), path.read_text(encoding="utf-8"), path) for title, path in pages.items()]


def _path(project: Project, outcomes: Sequence[Outcome]) -> Path:
    runs = [[outcome.spec.comparison, outcome.spec.variant, outcome.spec.seed] for outcome in outcomes]
    return project.state / "reports" / ".written" / f"{json_sha256(runs)[:16]}.json"


def _state(outcomes: Sequence[Outcome], pages: Iterable[Path], params: Params, backends: Backends) -> str | None:
    """Return a hash of everything that the reports depend on, and of their files; None if MLflow's state is not known."""
    project = backends.project
    if not project.tracking_uri.startswith(SQLITE):
        return None
    database = Path(project.tracking_uri.removeprefix(SQLITE))
    scores = [(outcome.spec.model_dump_json(), outcome.network, outcome.digest, outcome.scores.model_dump_json()) for outcome in outcomes]
    text = json.dumps([scores, backends.tags, project.tracking_uri, params.model_dump_json()])
    logs = [path for suffix in ("-wal", "-journal") if (path := database.with_name(f"{database.name}{suffix}")).exists()]
    results = [result_path(project, STANDING)] if any(not outcome.spec.overrides for outcome in outcomes) else []
    comparisons = dict.fromkeys(outcome.spec.comparison for outcome in outcomes)
    uploads = [path for comparison in comparisons if (path := last_upload(project, comparison)).exists()]
    return hash_of_states([database, *logs, *uploads, *results, *(page.parent for page in pages), *PACKAGES], text)
