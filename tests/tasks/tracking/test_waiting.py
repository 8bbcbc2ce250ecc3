"""No run waits in MLflow's locks for the upload of another, except for what must follow that upload."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.history import Progress
from tasks.runs.records import RunReport
from tasks.storage import Store
from tasks.tracking.live import LiveCurves
from tasks.tracking.published import current_runs
from tasks.tracking.tracker import Tracker
from tests.conftest import small_training
from tests.tasks.tracking.test_tracking import (  # noqa: F401 - fixtures
    client_of,
    comparison,
    current_identities,
    database,
    made,
    other,
    spec_of,
    store,
    tracker,
)

pytestmark = pytest.mark.slow
SECONDS = 300  # far more than any of these tests takes


@pytest.fixture(scope="module")
def report(packed: Path, store: Store) -> RunReport:  # noqa: F811
    """A run whose model is not logged, because logging takes seconds."""
    return made(packed, store, "x", small_training("softtriple"), EvaluationConfig()).model_copy(
        update={"scores_only": True, "comparison": "a table on d"}
    )


@pytest.fixture
def uploading(report: RunReport, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Slow upload of run "x": it sets the first event when it begins, and ends when the second is set."""
    has_begun, may_end = threading.Event(), threading.Event()
    log_files = Tracker._log_files

    def slow(self: Tracker, run_id: str, uploaded: RunReport) -> None:
        if uploaded.identity == report.identity:
            has_begun.set()
            assert may_end.wait(SECONDS)
        log_files(self, run_id, uploaded)

    monkeypatch.setattr(Tracker, "_log_files", slow)
    yield has_begun, may_end
    may_end.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def ended(future: "Future[Any]", seconds: float = SECONDS) -> Any:
    return future.result(timeout=seconds)


def still_waits(future: "Future[Any]") -> bool:
    try:
        future.result(timeout=1.0)
    except TimeoutError:
        return True
    return False


def test_curves_and_the_publishing_of_one_run_go_on_while_another_is_uploaded(
    tracker: Tracker,  # noqa: F811
    report: RunReport,
    uploading: tuple[threading.Event, threading.Event],
    pool: ThreadPoolExecutor,
    tmp_path: Path,
) -> None:
    has_begun, may_end = uploading
    first = pool.submit(tracker.publish, report)
    assert has_begun.wait(SECONDS)
    second = other(tracker, report, "second", "contrastive", 1, 0.5)
    live = LiveCurves(tracker, report.comparison, "second", spec_of(second))
    ended(pool.submit(live, Progress(0, 2, 5, 5, 100.0, {"loss": 1.0}, epoch_ended=True)))
    assert not live._failed
    assert client_of(tracker).get_metric_history(live._run_id, "epoch/loss")[0].value == 1.0
    ended(pool.submit(current_runs, tracker.uri, report.dataset.name, report.comparison))
    in_another_process = Tracker(tracker.uri, tmp_path, tracker._store)
    assert ended(pool.submit(in_another_process.publish, second)) == live._run_id
    assert not first.done()
    may_end.set()
    assert ended(first) is not None
    assert current_identities(tracker, report.comparison) == {"second", report.identity}


def test_a_comparison_waits_for_the_upload_of_its_runs_and_is_delivered_after_them(
    tracker: Tracker,  # noqa: F811
    report: RunReport,
    uploading: tuple[threading.Event, threading.Event],
    pool: ThreadPoolExecutor,
    tmp_path: Path,
) -> None:
    has_begun, may_end = uploading
    first = pool.submit(tracker.publish, report)
    assert has_begun.wait(SECONDS)
    summary = pool.submit(tracker.publish, comparison().model_copy(update={"comparison": report.comparison}))
    synced = pool.submit(Tracker(tracker.uri, tmp_path, tracker._store).sync)
    assert still_waits(summary)
    assert not synced.done()
    may_end.set()
    assert ended(first) is not None
    assert ended(summary) is not None
    ended(synced)
    assert not list((tmp_path / "outbox").iterdir())


def test_of_two_runs_of_one_variant_and_seed_that_are_published_together_one_stays(
    tracker: Tracker,  # noqa: F811
    report: RunReport,
    uploading: tuple[threading.Event, threading.Event],
    pool: ThreadPoolExecutor,
) -> None:
    has_begun, may_end = uploading
    first = pool.submit(tracker.publish, report)
    assert has_begun.wait(SECONDS)
    later = pool.submit(tracker.publish, other(tracker, report, "later", report.variant, report.seed, 0.4))
    assert still_waits(later)
    may_end.set()
    assert None not in (ended(first), ended(later))
    assert current_identities(tracker, report.comparison) == {"later"}


@pytest.mark.parametrize(("uri", "most"), [("sqlite:///{}/mlflow.db", 1), ("http://tracking.example:5000", 4)])
def test_a_local_database_has_one_call_at_a_time_and_a_server_as_many_as_come(
    tmp_path: Path,
    store: Store,  # noqa: F811
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    most: int,
) -> None:
    now, seen, counting = 0, [0], threading.Lock()

    def slow(*_: Any) -> None:
        nonlocal now
        with counting:
            now += 1
            seen.append(now)
        time.sleep(0.2)
        with counting:
            now -= 1

    trackers = [Tracker(uri.format(tmp_path), tmp_path, store) for _ in range(4)]  # as in four processes
    monkeypatch.setattr(MlflowClient, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(MlflowClient, "set_tag", slow)
    list(pool.map(lambda own: own._client.set_tag("run", "name", "value"), trackers))
    assert max(seen) == most
