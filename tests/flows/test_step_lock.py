"""A step requested by several processes: one runs it, the others wait and reuse its record, or run it if it failed or is forced."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dml_core.errors import TrainingError
from flows.reuse import step_lock
from flows.reuse.step_lock import StepLock
from tasks.locks import FileLock
from tasks.runs.identity import StepIdentity
from tasks.runs.records import StepRecord
from tasks.storage import Store

OF = StepIdentity("0123", "4567", ())
RECORD = StepRecord(step="train", identity="0123", key="train/0123", files=())


class Asking:
    """Requests for one step, their printed lines, and the number of times that it ran."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.kept: list[StepRecord] = []
        self.locks: list[StepLock] = []
        self.num_runs = 0
        self.going_on: Any = lambda: None
        self.services: Any = SimpleNamespace(
            project=SimpleNamespace(state=state),
            store=Store(str(state / "store"), state / "cache"),
            display=SimpleNamespace(say=self.said.append),
            check_going_on=lambda: self.going_on(),
        )
        monkeypatch.setattr(step_lock, "POLL_SECONDS", 0.01)
        monkeypatch.setattr(step_lock, "finished_record", lambda *_, **__: self.kept[0] if self.kept else None)
        monkeypatch.setattr(step_lock, "record_provenance", lambda *_: None)

    def lock(self, is_forced: bool = False) -> StepLock:
        self.locks.append(StepLock(SimpleNamespace(name="train"), OF, "d / v / seed 0", self.services, is_forced))
        return self.locks[-1]

    def work(self, _: object = None) -> StepRecord:
        self.num_runs += 1
        return RECORD


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asking]:
    found = Asking(tmp_path, monkeypatch)
    yield found
    for lock in found.locks:
        lock.release()


def no_slots() -> Any:
    return nullcontext()


def waiting(asking: Asking, lock: StepLock) -> tuple[threading.Thread, list[Any]]:
    """Request the step in a thread while it is running; return the thread and its future result."""
    got: list[Any] = []

    def ask() -> None:
        try:
            got.append(lock.run_once(asking.work, no_slots))
        except TrainingError as error:
            got.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not asking.said:
        thread.join(0.01)
    return thread, got


def test_who_comes_second_is_told_and_takes_what_the_first_kept(asking: Asking) -> None:
    first, second = asking.lock(), asking.lock()
    assert first.run_once(asking.work, no_slots) == RECORD
    thread, got = waiting(asking, second)
    thread.join(0.1)
    assert got == [], "the first has not kept its record yet"
    asking.kept.append(RECORD)
    first.release()
    thread.join()
    assert got == [RECORD]
    assert (asking.num_runs, first.taken_over, second.taken_over) == (1, False, True)
    (line,) = asking.said
    assert line.startswith("another dml (process ")
    assert line.endswith(") is training d / v / seed 0; waiting for it")


def test_who_comes_second_runs_it_where_the_first_left_nothing(asking: Asking) -> None:
    first, second = asking.lock(), asking.lock()
    first.run_once(asking.work, no_slots)
    thread, got = waiting(asking, second)
    first.release()  # as if killed
    thread.join()
    assert got == [RECORD]
    assert (asking.num_runs, second.taken_over) == (2, False)


def test_what_was_finished_before_the_turn_came_is_taken_and_forced_is_run_all_the_same(asking: Asking) -> None:
    asking.kept.append(RECORD)
    lock = asking.lock()
    assert lock.run_once(asking.work, no_slots) == RECORD
    assert (asking.num_runs, lock.taken_over) == (0, True)
    lock.release()
    forced = asking.lock(is_forced=True)
    forced.run_once(asking.work, no_slots)
    assert (asking.num_runs, forced.taken_over) == (1, False)
    thread, _ = waiting(asking, asking.lock(is_forced=True))  # two forced requests wait for each other
    assert asking.num_runs == 1
    forced.release()
    thread.join()
    assert asking.num_runs == 2


def test_a_step_that_fails_lets_the_next_one_in(asking: Asking) -> None:
    def fail(_: object) -> StepRecord:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asking.lock().run_once(fail, no_slots)
    assert asking.lock().run_once(asking.work, no_slots) == RECORD
    assert asking.said == []


def test_a_step_that_prefect_retries_does_not_wait_for_itself(asking: Asking) -> None:
    @contextmanager
    def turn() -> Iterator[None]:
        yield
        raise OSError("when the turn ended")

    def going_on() -> None:
        assert asking.said == []

    asking.going_on = going_on
    lock = asking.lock()
    with pytest.raises(OSError, match="when the turn ended"):
        lock.run_once(asking.work, turn)
    assert lock.run_once(asking.work, no_slots) == RECORD


def test_no_worker_is_held_while_waiting_and_a_flow_that_stops_waits_no_longer(asking: Asking) -> None:
    free = threading.Semaphore(1)
    held = FileLock(asking.services.store.folder(".locks") / ".train-0123")
    assert held.acquire(wait=False)
    got: list[BaseException] = []

    def ask() -> None:
        try:
            asking.lock().run_once(asking.work, lambda: free)  # type: ignore[arg-type, return-value]
        except TrainingError as error:
            got.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not asking.said:
        thread.join(0.01)
    assert free.acquire(timeout=5)

    def stop() -> None:
        raise TrainingError("not run: another run failed before it")

    asking.going_on = stop
    thread.join(5)
    assert [str(error) for error in got] == ["not run: another run failed before it"]
    assert asking.num_runs == 0
    held.release()
