"""Announced times of starts: measured on this machine, or none; a slow start reports its time."""

import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks import start_times
from tasks.sealed import FORMAT
from tasks.start_times import START_TIMES_FILE, StartTimes
from tests.damage import DAMAGE, as_format

Lines = list[str]


@pytest.fixture
def lines() -> Lines:
    return []


@pytest.fixture
def starts(tmp_path: Path, lines: Lines) -> StartTimes:
    return StartTimes(tmp_path / "state", lines.append)


def start(starts: StartTimes, what: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start something that takes this long by a clock of the test."""
    with monkeypatch.context() as patch:
        clock = [100.0]
        patch.setattr(start_times, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        with starts.timed(what):
            clock[0] += seconds


def test_only_what_was_measured_here_is_announced_and_the_last_time_counts(
    starts: StartTimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert starts.about("Ray") == ""
    start(starts, "Ray", 61.4, monkeypatch)
    start(starts, "Prefect", 9.0, monkeypatch)
    start(starts, "Ray", 21.4, monkeypatch)
    later = StartTimes(tmp_path / "state", print)
    assert [later.about(what) for what in ("Ray", "Prefect", "the workers")] == [" (about 21 s)", " (about 9 s)", ""]
    monkeypatch.setattr(start_times.platform, "node", lambda: "another machine with the same state folder")
    assert later.about("Ray") == ""
    start(later, "Ray", 5.0, monkeypatch)
    monkeypatch.undo()
    assert later.about("Ray") == " (about 21 s)"


def test_a_failed_start_is_not_recorded(starts: StartTimes) -> None:
    with pytest.raises(ValueError, match="no port"), starts.timed("Ray"):
        raise ValueError("no port")
    assert starts.about("Ray") == ""


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_set_aside_with_one_warning_and_replaced(
    how: str, starts: StartTimes, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(starts, "Ray", 21.4, monkeypatch)
    DAMAGE[how](tmp_path / "state" / START_TIMES_FILE)
    assert [starts.about("Ray"), starts.about("Ray")] == ["", ""]
    assert len(caplog.messages) <= 1  # a removed file is only missing
    start(starts, "Ray", 5.0, monkeypatch)
    assert starts.about("Ray") == " (about 5 s)"


def test_a_file_of_a_newer_version_and_a_folder_that_cannot_be_written_stop_no_start(
    starts: StartTimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(starts, "Ray", 21.4, monkeypatch)
    path = tmp_path / "state" / START_TIMES_FILE
    path.write_text(as_format(path.read_text(), FORMAT + 1))
    newer = path.read_bytes()
    assert starts.about("Ray") == ""
    start(starts, "Ray", 5.0, monkeypatch)
    assert path.read_bytes() == newer
    (tmp_path / "file").touch()
    start(StartTimes(tmp_path / "file", print), "Ray", 5.0, monkeypatch)


def test_a_start_that_takes_longer_than_the_last_one_reports_its_time(
    starts: StartTimes, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_times, "CLOCK_SECONDS", 0.2)
    with starts.timed("Ray"):
        time.sleep(0.5)
    assert len(lines) >= 2, "at 0.2 and 0.4 s"
    assert all(re.fullmatch(r"starting Ray: \d+ s so far", line) for line in lines)
    lines.clear()
    start(starts, "Ray", 30.0, monkeypatch)
    with starts.timed("Ray"):
        time.sleep(0.5)
    assert lines == [], "less than the last one"
    start(starts, "Ray", 0.3, monkeypatch)
    with starts.timed("Ray"):
        time.sleep(0.8)
    assert re.fullmatch(r"starting Ray: \d+ s so far \(last time 0 s\)", lines[0])
    num_lines = len(lines)
    time.sleep(0.5)
    assert len(lines) == num_lines, "it has started"


def test_of_several_at_the_same_time_one_reports_and_all_are_recorded(
    starts: StartTimes, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_times, "CLOCK_SECONDS", 0.2)  # lines at 0.2, 0.4 and 0.8 s

    def begin(seconds: float) -> None:
        with starts.timed("the workers"):
            time.sleep(seconds)

    threads = [threading.Thread(target=begin, args=(1.0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(lines) < 8, "four starts would report twelve lines"
    assert starts.about("the workers")
