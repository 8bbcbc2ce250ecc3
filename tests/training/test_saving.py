"""When a checkpoint is due and which call raises a failed write: a clock under the test's control, and a real thread."""

import itertools
import threading

import pytest
import torch

from dml_core.errors import StoreError
from dml_core.training.checkpoints import writing
from dml_core.training.checkpoints.writing import Saving, Watch, Writer
from dml_core.training.parallel.workers import Failures

CPU = torch.device("cpu")


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(writing, "time", found)
    monkeypatch.setattr(writing, "LOOK_SECONDS", 0.0)  # a check after every step
    return found


def test_a_checkpoint_is_due_so_many_minutes_after_the_last_unless_one_is_being_written(clock: Clock) -> None:
    is_behind = [False]
    watch = Watch(Saving(every_minutes=2.0), CPU, lambda: is_behind[0], Failures())
    due = []
    for seconds in (0, 100, 19, 1, 60):
        clock.now += seconds
        due.append(watch.look(1)[0])
    assert due == [False, False, False, True, True]
    watch.saved()
    clock.now += 119
    assert watch.look(1) == (False, False)
    clock.now += 1
    is_behind[0] = True
    assert watch.look(1) == (False, False)
    is_behind[0] = False
    assert watch.look(1) == (True, False)


def test_a_checkpoint_is_due_after_so_many_steps() -> None:
    watch = Watch(Saving(every_steps=3), CPU, lambda: False, Failures())
    assert [watch.look(step)[0] for step in range(1, 8)] == [False, False, True, False, False, True, False]


def test_whether_to_stop_is_asked_twice_a_second(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LOOK_SECONDS", 0.5)
    asked: list[float] = []
    watch = Watch(Saving(stop_wanted=lambda: bool(asked.append(clock.now))), CPU, lambda: False, Failures())
    for step in range(1, 101):
        clock.now += 0.125  # a power of two, so that sums are exact
        assert watch.look(step) == (False, False)
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert gaps == [0.5] * 24


@pytest.mark.parametrize("raises", [Writer.check, Writer.finish, lambda writer: writer.write(lambda: None)])
def test_what_failed_in_the_background_is_raised_by_a_later_call(raises) -> None:
    writer = Writer(in_background=True)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise StoreError("disk full")

    writer.write(fail)
    assert failed.wait(60)
    while writer.is_behind:
        pass
    with pytest.raises(StoreError, match="disk full"):
        raises(writer)
    writer.close()


def test_a_writer_is_behind_until_all_is_written_in_order() -> None:
    writer, may_go_on, written = Writer(in_background=True), threading.Event(), []
    writer.write(lambda: (may_go_on.wait(60), written.append(1)))
    writer.write(lambda: written.append(2))
    assert writer.is_behind
    may_go_on.set()
    writer.finish()
    assert written == [1, 2]
    assert not writer.is_behind
    writer.close()
