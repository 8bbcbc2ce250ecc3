"""Waiting for runs: failed ones are named, and the others continue, or no more are started."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dml_core.errors import ConfigError, SavedNetworkError, TrainingError
from flows.chain import finish
from flows.cli.run import _print_outcome
from flows.outcomes import Failure, Outcome, RunsFailedError
from tasks.environment import Project
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import CheckpointRecord, EmbeddingRecord, MetricRecord, ScoreRecord, StepRecord, describe_folder
from tasks.runs.specs import RunSpec
from tasks.storage import Store
from tests.conftest import ROOT

RUNS = comparison_runs(load_params(ROOT / "params.yaml"), "synthetic", ["softmax"])


@dataclass
class Submitted:
    """A run's steps that end at once or after some seconds, with or without an error."""

    spec: RunSpec
    error: Exception | None = None
    ran: bool = True
    must_train: bool = True
    seconds: float = 0

    def when_ended(self, then: Callable[[], object]) -> None:
        threading.Timer(self.seconds, then).start() if self.seconds else then()

    def wait(self) -> Outcome | Exception:
        scores = MetricRecord(step="evaluate", identity="i", key="evaluate/i", files=(), metrics={"recall@1": 0.5})
        return self.error or Outcome(self.spec, scores, {"train": self.ran}, True, "there", "there", 12.3)


@dataclass
class Shown:
    """Stand-in for a flow's services, which records the lines of the display."""

    lines: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    fail_fast: bool = False

    @property
    def display(self) -> "Shown":
        return self

    def stop(self) -> None:
        self.stopping.set()

    def say(self, text: str) -> None:
        self.lines.append(text)

    def finished(self, title: str, trained: bool, line: str | None) -> None:
        self.lines += [line] if line else []


FAILED = TrainingError(f"{RUNS[1].title}: the loss is not finite\nand more")
FAILED_LINE = f"{RUNS[1].title}: FAILED: the loss is not finite and more"


def test_the_others_go_on_and_what_was_there_is_one_line() -> None:
    shown: Any = Shown()
    chains = [Submitted(RUNS[0], ran=False), Submitted(RUNS[1], FAILED), Submitted(RUNS[2])]
    outcomes, failures = finish(chains, shown)
    assert [outcome.spec for outcome in outcomes] == [RUNS[0], RUNS[2]]
    assert [failure.reason for failure in failures] == ["the loss is not finite and more"]
    assert shown.lines == [FAILED_LINE, f"{RUNS[2].title}: R@1 50.0 %, 12 s", "1 of 3 runs reused"]
    assert not shown.stopping.is_set()
    assert str(RunsFailedError(failures, 3, ())) == f"1 of 3 runs failed; the first: {RUNS[1].title}: the loss is not finite and more"


def test_each_run_is_shown_when_it_ends_and_returned_in_its_place() -> None:
    shown: Any = Shown()
    outcomes, failures = finish([Submitted(RUNS[0], seconds=0.4), Submitted(RUNS[1], seconds=0.2), Submitted(RUNS[2])], shown)
    assert [line.partition(":")[0] for line in shown.lines] == [run.title for run in (RUNS[2], RUNS[1], RUNS[0])]
    assert [outcome.spec for outcome in outcomes] == RUNS[:3]
    assert not failures


def test_runs_are_added_to_their_tables_as_they_end_and_finished_ones_all_at_once() -> None:
    added: list[list[str]] = []
    later: list[Callable[[], object]] = []
    running = Submitted(RUNS[2])
    running.when_ended = later.append  # type: ignore[method-assign]

    def add(outcomes: Any, failures: Any) -> None:
        added.append([one.spec.title for one in (*outcomes, *failures)])
        if later:
            later.pop()()

    shown: Any = Shown()
    finish([Submitted(RUNS[0], ran=False), running, Submitted(RUNS[1], FAILED)], shown, add)
    assert added == [[RUNS[0].title, RUNS[1].title], [RUNS[2].title]]


def test_fail_fast_begins_nothing_more() -> None:
    shown: Any = Shown(fail_fast=True)
    outcomes, failures = finish([Submitted(RUNS[1], FAILED), Submitted(RUNS[2], TrainingError("not run"))], shown)
    assert outcomes == []
    assert [failure.line for failure in failures] == [FAILED_LINE]
    assert shown.lines == [FAILED_LINE]
    assert shown.stopping.is_set()


@pytest.mark.parametrize(("error", "unforeseen"), [(FAILED, False), (SavedNetworkError("no rows"), True), (KeyError("head"), True)])
def test_a_fault_of_this_program_is_told_from_what_a_person_can_mend(error: Exception, unforeseen: bool) -> None:
    shown: Any = Shown()
    _, failures = finish([Submitted(RUNS[0], FAILED), Submitted(RUNS[1], error)], shown)
    failed = RunsFailedError(failures, 2, ())
    assert failed.unforeseen == unforeseen
    assert failed.__cause__ is (error if unforeseen else None)


@pytest.mark.parametrize("is_in_mlflow", [True, False])
def test_a_single_run_says_that_its_record_waits_for_mlflow(is_in_mlflow: bool, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Submitted(RUNS[0]).wait()
    assert isinstance(outcome, Outcome)
    _print_outcome(replace(outcome, delivered=is_in_mlflow), Project(ROOT, ROOT / "state", "", "http://mlflow"))
    assert ("1 record waits for MLflow" in capsys.readouterr().out) is not is_in_mlflow


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TrainingError(f"{RUNS[0].title}: the loss is nan"), "the loss is nan"),
        (RuntimeError("\n\x1b[2J out of memory\nTraceback"), "\\x1b[2J out of memory"),
        (RuntimeError("\n"), "RuntimeError"),
        (ValueError(), "ValueError"),
        (ConfigError("weights 'https://a:b@c/d?X-Amz-Signature=e' cannot be downloaded"), "weights 'https://c/d' cannot be downloaded"),
    ],
)
def test_a_failure_s_reason_is_one_printable_line_without_secrets(error: Exception, reason: str) -> None:
    assert Failure.of(RUNS[0], error).reason == reason


@pytest.mark.parametrize("table", [None, "softtriple/table1"])
def test_a_flow_keeps_the_recall_of_each_class_only_for_the_comparison_that_shows_it(table: str | None, tmp_path: Path) -> None:
    """Stanford Online Products has 11,316 test classes, and a flow of all tables has thousands of runs."""
    store = Store("s3://unreachable/store", tmp_path)  # not asked: the copies here are intact
    for step, names in {"train": ("c",), "embed": ("e",), "evaluate": ("metrics.json", "class_recalls.json")}.items():
        for name in names:
            store.folder(f"{step}/i").mkdir(parents=True, exist_ok=True)
            (store.folder(f"{step}/i") / name).write_text('{"recall@1": 0.5}')
    kinds: dict[str, type[StepRecord]] = {"train": CheckpointRecord, "embed": EmbeddingRecord, "evaluate": ScoreRecord}
    records = [
        kind(step=step, identity="i", key=f"{step}/i", files=describe_folder(store.folder(f"{step}/i"))) for step, kind in kinds.items()
    ]
    spec = RUNS[0].model_copy(update={"table": table})
    outcome = Outcome.of(spec, records, dict.fromkeys(kinds, False), True, store, "digest")
    assert outcome.scores.metrics == {"recall@1": 0.5}
    assert outcome.scores.class_recalls == ({} if table else {"recall@1": 0.5})
