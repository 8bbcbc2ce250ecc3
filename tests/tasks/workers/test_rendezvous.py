"""Workers of one machine meet at a file, for any characters in its path."""

from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from tasks.workers import rendezvous
from tasks.workers.rendezvous import _join


def _meet(folder: Path, rank: int) -> None:
    _join("gloo", folder / "rendezvous", rank, 2)
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


def test_workers_that_do_not_meet_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, ray = MagicMock(), MagicMock()
    group.__len__.return_value = 1
    group.get_resources_per_worker.return_value = {"CPU": 1}

    def fail(answers: Any) -> None:
        if isinstance(answers, list):
            group.execute_single_async.call_args.args[3].touch()
            raise RuntimeError("a worker died")

    monkeypatch.setattr(rendezvous, "ray", ray)
    ray.get = fail
    with pytest.raises(RuntimeError, match="a worker died"):
        rendezvous._Backend().on_start(group, rendezvous.Rendezvous(MagicMock(), str(tmp_path)))
    assert [*tmp_path.iterdir()] == []
