"""Displayed progress of runs, in a terminal and in a pipe."""

import contextlib
import io
import logging
import os
import re

import pytest
from rich.console import Console

from dml_core.training.history import Progress
from tasks.wording import duration
from tasks.workers import progress
from tasks.workers.progress import ProgressDisplay, Terminal


def screen(console: Console) -> str:
    """Return all output without cursor movements and colours."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def console(request: pytest.FixtureRequest) -> Console:
    return Console(file=io.StringIO(), force_terminal=request.param, width=120, highlight=False)


def training(epoch: int, step: int, ended: bool = False) -> Progress:
    return Progress(epoch, 6, step, 10, 250.0, {"loss": 2.5}, epoch_ended=ended)


def test_a_flow_from_its_first_line_to_its_last(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    display = ProgressDisplay(console)
    display.say("preparing synthetic")
    display.plan(num_runs=4, num_to_train=3)
    display("a / b / seed 0", training(0, 5))
    clock[0] = 30.0
    display("a / b / seed 0", training(3, 0))
    display._bars.refresh()
    display.step("a / b / seed 0", "embedding")
    display._bars.refresh()
    clock[0] = 60.0
    display.finished("a / b / seed 0", True, "a / b / seed 0: R@1 50.0 %, 55 s")
    display.finished("a / b / seed 1", False, None)
    display._bars.refresh()
    display.finished("a / b / seed 2", True, "a / b / seed 2: FAILED: no")
    display.close()
    shown = screen(console)
    for line in ("preparing synthetic", "a / b / seed 0: R@1 50.0 %, 55 s", "a / b / seed 2: FAILED: no"):
        assert shown.count(line) == 1
    assert "epoch 4/6  loss 2.500  250 images/s" in shown
    assert "a / b / seed 1" not in shown
    if console.is_terminal:
        assert re.search(r"seed 0 +embedding", shown)
        assert "run 3 of 4, about 2 min left" in shown  # one of three took a minute
    else:
        assert "seed 0: R@1 50.0 %, 55 s  (1 of 4 done, about 2 min left)" in shown
        assert "embedding" not in shown
        assert "\x1b" not in console.file.getvalue()
        assert max(map(len, shown.splitlines())) < 120


def test_runs_that_train_beside_the_finished_ones_count_for_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, about a minute each: when the first of six ends, three minutes are left, and not five."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    console = Console(file=io.StringIO(), width=120)
    display = ProgressDisplay(console)
    display.plan(6, 6)
    display("one", training(0, 5))
    clock[0] = 20.0
    display("two", training(0, 5))
    clock[0] = 60.0
    display.finished("one", True, "one: done")
    display("three", training(0, 5))
    clock[0] = 80.0
    display.finished("two", True, "two: done")
    lines = [line for line in screen(console).splitlines() if " done" in line]
    assert lines == ["one: done  (1 of 6 done, about 3 min left)", "two: done  (2 of 6 done, about 2 min left)"]


def test_a_pipe_is_told_every_quarter_of_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    console = Console(file=io.StringIO(), width=120)
    display = ProgressDisplay(console)
    display.plan(1, 1)
    for clock[0] in range(1, 46):
        display("run", training(1, 1))
    assert screen(console).count("epoch 2/6") == 3


def test_the_lines_are_logged_for_prefect_with_every_epoch_s_loss(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tasks")
    display = ProgressDisplay(Console(file=io.StringIO()))
    display.say("starting")
    display("run", training(0, 5))
    display("run", training(0, 10, ended=True))
    display.step("run", "embedding")
    assert caplog.messages == ["starting", "run: epoch 1 of 6: loss 2.5000 (250 images/s)", "run: embedding"]


@pytest.mark.parametrize(("seconds", "said"), [(3.2, "3 s"), (99, "99 s"), (120, "2 min"), (5300, "88 min"), (7260, "2 h 1 min")])
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_narrow_terminal_keeps_the_time_that_is_left_and_does_without_the_bar() -> None:
    narrow = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
    display = ProgressDisplay(narrow)
    display.plan(num_runs=2, num_to_train=2)
    for step in range(1, 6):
        display("synthetic / heated_up_softmax / seed 0", training(3, step))
        display._bars.refresh()
    display.close()
    shown = screen(narrow)
    assert re.search(r"synthetic / heated_up_softmax / seed 0 epoch 4/6  loss 2\.500 +(-|\d+):", shown)
    assert "…" not in shown
    assert "images/s" not in shown


def test_a_reader_that_is_gone_is_an_error_and_no_exit() -> None:
    """Rich itself would raise SystemExit(1), which ends a verb with the code of a fault of this program."""
    reader, writer = os.pipe()
    os.close(reader)
    terminal = Terminal()
    terminal.file = os.fdopen(writer, "w", buffering=1)
    with pytest.raises(BrokenPipeError):
        ProgressDisplay(terminal).say("a line")
    with contextlib.suppress(BrokenPipeError):
        terminal.file.close()
