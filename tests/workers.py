"""Start several worker processes of one gloo group in tests."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tests.forked  # noqa: F401 - it names what the fork server imports
from dml_core.data.views.batches import Loader

TIMEOUT = timedelta(minutes=3)  # a deadlock fails the test instead of blocking for half an hour


def spawn(work: Callable[..., None], num_workers: int, *arguments: Any) -> None:
    """Run `work(rank, *arguments)` in `num_workers` forked processes of one gloo group, one thread each."""
    with tempfile.TemporaryDirectory() as folder:  # rendezvous by file: a port that is free now may be taken later
        mp.start_processes(
            _join, (work, num_workers, f"file://{folder}/meet", TIMEOUT, arguments), nprocs=num_workers, start_method="forkserver"
        )


def load_float64() -> None:
    """Make this process compute in float64, including images from every loader."""
    torch.set_default_dtype(torch.float64)
    batches = Loader.batches
    Loader.batches = lambda *arguments: ((images.double(), indices) for images, indices in batches(*arguments))


def _join(rank: int, work: Callable[..., None], num_workers: int, where: str, timeout: timedelta, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=num_workers, timeout=timeout)
    work(rank, *arguments)
    dist.destroy_process_group()
