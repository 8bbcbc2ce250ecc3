"""Workers of one machine meet at a file, for any characters in its path; how long they may wait for each other."""

from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.workers import rendezvous
from tasks.workers.group import WorkerGroup, _GroupEndedError
from tasks.workers.jobs import JobState
from tasks.workers.placement import Placement
from tasks.workers.rendezvous import _join
from tests.tasks.workers.conftest import job


def _meet(folder: Path, rank: int) -> None:
    _join("gloo", folder / "rendezvous", rank, 2, timedelta(minutes=1))
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    assert total.item() == 3
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["plain", "a b", "ü", "#x", "a?b", "%41", "a&b=c", "'\"", "文"])
def test_two_workers_meet_at_any_path(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    processes = [get_context("fork").Process(target=_meet, args=(folder, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    assert {path.name for path in folder.iterdir()} <= {"rendezvous"}
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("error", [None, RuntimeError("a worker died")])
def test_the_file_stays_until_the_group_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """NCCL's workers meet there a second time, at their first exchange: without the file they waited until the flow gave up the run."""
    workers, there = MagicMock(), list[bool]()
    workers.__len__.return_value = 1
    workers.get_resources_per_worker.return_value = {"CPU": 1, "GPU": 1}
    workers.execute_single_async = lambda rank, join, backend, meeting_file, *_: meeting_file.touch()
    monkeypatch.setattr(rendezvous, "ray", MagicMock())

    class Trainer:
        def fit(self) -> None:
            rendezvous._Backend().on_start(workers, rendezvous.Rendezvous(MagicMock(), meeting_file, 1800))
            there.append(meeting_file.exists())
            if error is not None:
                raise error

    meeting_file = tmp_path / "workers" / "rendezvous"
    group = WorkerGroup(Placement("cuda", 1, 1), ScaleSpec(), tmp_path, print, StartTimes(tmp_path, print))
    group._fit(Trainer(), meeting_file)
    assert there == [True]
    assert group._error is error
    assert [*meeting_file.parent.iterdir()] == []


@pytest.mark.parametrize(
    ("hang_minutes", "quiet_seconds", "ends"), [(2, 1700, False), (2, 1900, True), (90, 1900, False), (90, 5500, True)]
)
def test_a_long_operation_may_last_half_an_hour_or_hang_minutes_if_that_is_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang_minutes: float, quiet_seconds: float, ends: bool
) -> None:
    """Scoring all images of a large test set after an epoch may take longer, and no setting allowed it."""
    group = WorkerGroup(Placement("cpu", 1, 1), ScaleSpec(hang_minutes=hang_minutes), tmp_path, print, StartTimes(tmp_path, print))
    states = [JobState(is_taken=True, is_patient=True, quiet_seconds=quiet_seconds), JobState(facts={})]
    answers = {"submit": lambda: True, "held": lambda: (None, None), "look": lambda: states.pop(0)}
    monkeypatch.setattr(group, "start", lambda: setattr(group, "_thread", MagicMock()))
    monkeypatch.setattr(group, "_ask", lambda call, *_: answers[call]())
    with pytest.raises(_GroupEndedError, match="at least 30 in a long") if ends else nullcontext():
        assert group._attempt(job(tmp_path, tmp_path, "scored"), print, print) == {}
