"""Workers that start while datasets are prepared: the starting thread stays until the end; the first job reports errors."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from dml_core.errors import TrainingError
from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.workers import pool
from tasks.workers.group import WorkerGroup
from tasks.workers.placement import Placement
from tasks.workers.pool import Workers


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what is started and stopped; no Ray runs."""
    calls: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(pool, "start_ray", lambda scale, num_runs: calls.append("ray") or Placement("cpu", 1, 2))
    monkeypatch.setattr(pool, "stop_ray", lambda: calls.append(f"stopped, {len(threads())} thread"))
    monkeypatch.setattr(WorkerGroup, "_start_fit", lambda self: calls.append("group"))
    monkeypatch.setattr(WorkerGroup, "_attempt", lambda self, job, watch: {"device": "cpu"})
    return calls


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    scale = ScaleSpec(num_workers=1, concurrent_runs=2, device="cpu")
    made = Workers(scale, tmp_path, lambda text: None, StartTimes(tmp_path, lambda text: None))
    yield made
    made.close()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "workers-start"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("num_jobs", "num_groups"), [(1, 1), (2, 2), (5, 2)])
def test_as_many_groups_start_as_have_jobs_and_the_thread_outlives_ray(
    calls: list[str], workers: Workers, num_jobs: int, num_groups: int
) -> None:
    """Linux ends Ray's processes when the thread ends that started them."""
    workers.start_early(num_jobs)
    until(lambda: calls.count("group") == num_groups)
    time.sleep(0.1)
    assert calls == ["ray", *["group"] * num_groups]
    workers.close()
    assert calls[-1] == "stopped, 1 thread"
    assert not ray.is_initialized(), "closing groups that never started has started Ray"
    until(lambda: not threads())


def test_nothing_starts_early_without_jobs_or_on_a_cluster(calls: list[str], workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    workers.start_early(0)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    workers.start_early(3)
    assert (calls, threads()) == ([], [])


def test_an_early_start_that_fails_is_repeated_and_reported_by_the_first_job(
    calls: list[str], workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(scale: ScaleSpec, num_runs: int | None) -> Placement:
        calls.append("fails")
        raise TrainingError("Ray did not start")

    monkeypatch.setattr(pool, "start_ray", fails)
    workers.start_early(1)
    until(lambda: calls == ["fails"])
    with pytest.raises(TrainingError, match="Ray did not start"), workers.turn(is_to_embed=False):
        pass
    assert calls == ["fails", "fails"]


def test_an_embedding_comes_before_the_trainings_that_wait_in_their_order(calls: list[str], workers: Workers) -> None:
    """Two groups are busy, six trainings wait, then comes an embedding: it takes the first group that is free."""
    began: list[str] = []
    go_on = threading.Semaphore(0)

    def hold(step: str) -> None:
        with workers.turn(is_to_embed=step == "embed"):
            began.append(step)
            go_on.acquire()

    steps = [f"train {number}" for number in range(8)] + ["embed"]
    threads = [threading.Thread(target=hold, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    order = [*steps[:2], "embed", *steps[2:8]]
    for number in range(3, 10):
        go_on.release()
        until(lambda number=number: len(began) == number)
        assert began == order[:number]
    go_on.release(2)
    for thread in threads:
        thread.join(20)
    assert began == order


def test_who_waits_for_a_group_when_the_flow_ends_gets_none(calls: list[str], workers: Workers) -> None:
    refused = list[str]()

    def wait() -> None:
        try:
            with workers.turn(is_to_embed=False):
                refused.append("no")
        except TrainingError as error:
            refused.append(str(error))

    with contextlib.ExitStack() as both:
        for _ in range(2):
            both.enter_context(workers.turn(is_to_embed=False))
        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: bool(workers._waiting))
        workers.close()
    thread.join(20)
    assert refused == ["the flow is ending; no new jobs are accepted"]
