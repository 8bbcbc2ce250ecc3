"""Workers of one machine meet at a file, for any characters in its path."""

from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tasks.workers.rendezvous import _join


def _meet(folder: Path, rank: int) -> None:
    _join("gloo", folder / "rendezvous", rank, 2, 30)
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
