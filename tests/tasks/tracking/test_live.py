"""Curves during training: what is sent when, and the effect of a failing server."""

from typing import Any

import pytest

from dml_core.errors import TrackingError
from dml_core.training.history import Progress
from tasks.tracking import live as live_module
from tasks.tracking.live import LiveCurves


class Tracker:
    """Tracker that records its calls and fails after `num_good` of them."""

    uri = "sqlite:///nowhere"

    def __init__(self, num_good: int = 100) -> None:
        self.num_good, self.begun, self.sent = num_good, [], []

    def _call(self) -> None:
        self.num_good -= 1
        if self.num_good < 0:
            raise TrackingError("no answer")

    def begin_run(self, comparison: str, identity: str, spec: Any) -> str:
        self._call()
        self.begun.append((comparison, identity, spec))
        return "r"

    def log_epochs(self, run_id: str, points: list[tuple[str, float, int]]) -> None:
        self._call()
        self.sent.append((run_id, points))


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(live_module, "time", made)
    return made


def epoch(number: int, ended: bool = True) -> Progress:
    return Progress(number, 4, 1, 1, 1.0, {"loss": float(number)}, epoch_ended=ended)


def test_epochs_are_sent_together_every_ten_seconds(clock: Clock) -> None:
    tracker = Tracker()
    curves = LiveCurves(tracker, "c", "i", "spec")
    curves(epoch(0, ended=False))
    clock.now += 9.9
    curves(epoch(0))
    assert not tracker.begun, "of a run that ends within ten seconds nothing is sent before it is published"
    clock.now += 0.1
    curves(epoch(1, ended=False))
    assert not tracker.begun, "in the middle of an epoch nothing is sent"
    curves(epoch(1))
    assert tracker.begun == [("c", "i", "spec")]
    for number, seconds in ((2, 0), (3, 9.9), (4, 0.1)):
        clock.now += seconds
        curves(epoch(number))
    assert tracker.sent == [("r", [("epoch/loss", float(number), number + 1) for number in numbers]) for numbers in ((0, 1), (2, 3, 4))]


@pytest.mark.parametrize("num_good", [0, 1])
def test_a_server_that_fails_once_is_left_alone(clock: Clock, num_good: int, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(num_good)
    curves = LiveCurves(tracker, "c", "i", "spec")
    for seconds in (0, 10):
        clock.now += seconds
        curves(epoch(0))
    tracker.num_good = 100
    clock.now += 100
    curves(epoch(1))
    assert not tracker.sent
    assert [record.getMessage() for record in caplog.records] == ["no answer; no live curves for this run, training continues"]


@pytest.mark.parametrize("fails", [False, True])
def test_system_metrics_are_watched_where_asked_until_the_run_ends_or_the_server_fails(
    clock: Clock, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[str] = []

    class Monitor:
        def __init__(self, run_id: str, resume_logging: bool, tracking_uri: str) -> None:
            assert (run_id, resume_logging, tracking_uri) == ("r", True, Tracker.uri)

        def start(self) -> None:
            watched.append("start")

        def finish(self) -> None:
            watched.append("finish")

    monkeypatch.setattr(live_module, "SystemMetricsMonitor", Monitor)
    monkeypatch.setattr(live_module, "SECONDS_BETWEEN", 0.0)
    LiveCurves(Tracker(), "c", "i", "spec")(epoch(0))
    assert not watched, "not asked for"
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    tracker = Tracker(num_good=2 if fails else 100)
    curves = LiveCurves(tracker, "c", "i", "spec")
    curves(epoch(0))
    assert watched == ["start"]
    if fails:
        curves(epoch(1))
        assert watched == ["start", "finish"]
    curves.close()
    assert watched == ["start", "finish"]
