"""Reports that nothing has changed for are not written again; any change of what they depend on, or of their own files, writes them."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.outcomes import Failure, Outcome
from flows.reports import Report, report_standing
from flows.reuse import written_reports
from tasks.environment import Project
from tasks.runs.best import VALIDATION
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import MetricRecord
from tests.conftest import ROOT

PARAMS = load_params(ROOT / "params.yaml")
RUNS = comparison_runs(PARAMS, "synthetic", ["softmax", "softtriple"], (0,))


class Backends:
    """A project with a local database, one report and its code, without MLflow."""

    def __init__(self, root: Path) -> None:
        self.project = Project(root, root / "state", "", f"sqlite:///{root}/mlflow.db")
        self.tags = {"git_commit": "a"}
        self.outcomes = [outcome(spec, 0.5) for spec in RUNS]
        self.params = PARAMS
        self.files = [root / name for name in ("mlflow.db", "code/a.py", "state/tables/project/standing.json", "report/report.md")]
        for path in self.files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("one")

    @property
    def report(self) -> Report:
        path = self.files[-1]
        return Report.of_standing(self.outcomes, (), path.read_text(), path)


def outcome(spec: Any, recall: float) -> Outcome:
    scores = MetricRecord(step="evaluate", identity="i", key="evaluate/i", files=(), metrics={"recall@1": recall, VALIDATION: recall})
    return Outcome(spec, scores, {"train": False}, True, "network", "figures", 0.0, digest="digest")


@pytest.fixture
def backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Backends(tmp_path)
    monkeypatch.setattr(written_reports, "PACKAGES", [tmp_path / "code"])
    written_reports.record_reports([made.report], made.outcomes, made.params, made)  # type: ignore[arg-type]
    return made


def up_to_date(backends: Any) -> list[Report] | None:
    return written_reports.written_reports(backends.outcomes, backends.params, backends)


def test_nothing_changed(backends: Any) -> None:
    assert up_to_date(backends) == [backends.report]


def rewritten(number: int) -> Callable[[Any], None]:
    """Return a change of one file to other content of the same size."""

    def change(backends: Any) -> None:
        backends.files[number].write_text("two")

    return change


def gone(number: int) -> Callable[[Any], None]:
    return lambda backends: backends.files[number].unlink()


def with_outcome(**changes: Any) -> Callable[[Any], None]:
    def change(backends: Any) -> None:
        backends.outcomes[0] = replace(backends.outcomes[0], **changes)

    return change


def with_project(**changes: Any) -> Callable[[Any], None]:
    def change(backends: Any) -> None:
        backends.project = replace(backends.project, **changes)

    return change


CHANGES: dict[str, Callable[[Any], None]] = {
    "database": rewritten(0),
    "database gone": gone(0),
    "database with a journal": lambda backends: backends.files[0].with_name("mlflow.db-journal").write_text("x"),
    "parameters": lambda backends: setattr(backends, "params", load_params(ROOT / "params.yaml", ["comparison.reference=softtriple"])),
    "code": rewritten(1),
    "code gone": gone(1),
    "result": rewritten(2),
    "result gone": gone(2),
    "report": rewritten(3),
    "report gone": gone(3),
    "figure beside the report": lambda backends: backends.files[3].with_name("recall.png").write_text("x"),
    "commit": lambda backends: backends.tags.update(git_commit="b"),
    "score": with_outcome(scores=outcome(RUNS[0], 0.6).scores),
    "network": with_outcome(network="other"),
    "images": with_outcome(digest="other"),
    "settings": with_outcome(spec=RUNS[0].model_copy(update={"seed": 0, "overrides": ("a=1",)})),
    "another server": with_project(tracking_uri="http://127.0.0.1:5000"),
    "another run": lambda backends: backends.outcomes.append(outcome(RUNS[0].model_copy(update={"seed": 1}), 0.5)),
    "a run less": lambda backends: backends.outcomes.pop(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_writes_the_reports_again(backends: Any, change: str) -> None:
    CHANGES[change](backends)
    assert up_to_date(backends) is None


def test_compiled_code_counts_as_unchanged(backends: Any) -> None:
    (backends.files[1].parent / "__pycache__").mkdir()
    (backends.files[1].parent / "__pycache__/a.pyc").write_text("compiled")
    assert up_to_date(backends) is not None


def test_the_report_of_all_runs_replaces_that_of_a_part_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of both are on this machine, and MLflow's database is the same with either."""
    monkeypatch.setattr(written_reports, "PACKAGES", [])
    made: Any = Backends(tmp_path)
    made.tracker, uploaded = SimpleNamespace(publish=lambda summary: uploaded.append(summary.folder) or "run"), list[str]()
    settings = ("comparison.protocol.num_epochs=3",)
    params = load_params(ROOT / "params.yaml", settings)
    whole = [outcome(spec, 0.5) for spec in comparison_runs(params, "synthetic", ["softmax", "softtriple"], (0,), settings)]

    def report(outcomes: list[Outcome]) -> None:
        if written_reports.written_reports(outcomes, params, made) is None:
            written_reports.record_reports([report_standing(outcomes, (), params, made)], outcomes, params, made)

    for outcomes in (whole, whole, whole[:1], whole[:1], whole, whole):
        report(outcomes)
    first, part, last = uploaded
    assert first == last != part


def test_a_replaced_file_is_found_though_size_and_time_are_the_same(backends: Any) -> None:
    path = backends.files[0]
    times = path.stat()
    other = path.with_name("other")
    other.write_text("two")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)
    assert up_to_date(backends) is None


@pytest.mark.parametrize("how", ["failed", "waits", "older code", "of a table"])
def test_reports_that_are_not_final_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    made: Any = Backends(tmp_path)
    monkeypatch.setattr(written_reports, "PACKAGES", [])
    report = made.report
    if how == "failed":
        report = replace(report, failures=(Failure(RUNS[0], "reason"),))
    if how == "waits":
        report = replace(report, num_undelivered=1)
    if how == "older code":
        with_outcome(older_code=("a.py",))(made)
    if how == "of a table":
        with_outcome(spec=RUNS[0].model_copy(update={"table": "softtriple/table1"}))(made)
    written_reports.record_reports([report], made.outcomes, made.params, made)
    assert up_to_date(made) is None
