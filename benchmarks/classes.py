"""Benchmark a training step of a loss with centres as the number of classes grows, and with classes spread over workers.

    .venv/bin/python benchmarks/classes.py [LOSS...] [--workers 2] [--most 10000000] [--batch 128] [--dim 64]

A step is a linear layer instead of a network, the loss of a batch of 128 embeddings of 64 dimensions, the backward pass and Adam. Three
setups: one worker; several workers that each hold all classes and 128 / n samples, whose centres' gradients are averaged by
DistributedDataParallel (the peer); and several that each hold a part of the classes (`shard_classes`). One thread per worker, all on the
CPU of this machine. Time is the median step of the slowest worker. Memory is a worker's peak during steps, centres and moments included,
above its memory before it had a loss; the initial full set of centres, which is cut, is not counted. Sizes that do not fit into free memory
are not measured. Exponent: e of time ~ classes^e between the smallest and the largest size measured. Prints Markdown.
"""

import argparse
import gc
import math
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dml_core.losses.class_shards import ClassShard
from dml_core.losses.registry import build_loss
from dml_core.training.parallel.sharded_state import leave_to_their_worker
from dml_core.training.parallel.workers import TrainingSystem, shard_sizes

LOSSES = ("normalised_softmax", "softtriple", "heated_up_softmax", "sgsl")
OPTIONS = {"softtriple": {"num_centres": 2}}
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
MOST_STEPS, SECONDS = 7, 6.0
PRELOADED = [
    "dml_core.training.parallel.sharded_state",
    "dml_core.losses.sgsl",
    "dml_core.losses.softtriple",
    "torch._dynamo",
    "torch.distributed",
]
MIB = 2**20


class Batch(NamedTuple):
    """Batch size and dimensions of the embeddings."""

    size: int = 128
    dim: int = 64


def main() -> None:
    arguments = parse_arguments()
    multiprocessing.set_forkserver_preload(PRELOADED)
    ways = [("one worker", 1, False), (f"{arguments.workers} workers", arguments.workers, False), ("spread", arguments.workers, True)]
    header = ["loss", "classes", *(f"{name}, {unit}" for unit in ("ms", "MiB") for name, _, _ in ways)]
    print(f"| {' | '.join([*header, 'spread / peer, time', 'memory'])} |\n|{'---|' * (len(header) + 2)}", flush=True)
    exponents = []
    for loss in arguments.losses or LOSSES:
        milliseconds: dict[str, dict[int, float]] = {name: {} for name, _, _ in ways}
        for num_classes in (size for size in SIZES if size <= arguments.most):
            found = [
                measured(loss, num_classes, num_workers, spread, Batch(arguments.batch, arguments.dim)) for _, num_workers, spread in ways
            ]
            for (name, _, _), cost in zip(ways, found, strict=True):
                if cost is not None:
                    milliseconds[name][num_classes] = cost[0]
            cells = [f"{cost[unit]:,.1f}" if cost else "not measured" for unit in (0, 1) for cost in found]
            peer, spread_cost = found[1:]
            ratios = [f"{spread_cost[unit] / peer[unit]:.2f}" if peer and spread_cost else "-" for unit in (0, 1)]
            print(f"| {' | '.join([f'`{loss}`', f'{num_classes:,}', *cells, *ratios])} |", flush=True)
        exponents.append([f"`{loss}`", *(exponent(milliseconds[name]) for name, _, _ in ways)])
    print(f"\n| exponent of time | {' | '.join(name for name, _, _ in ways)} |\n|{'---|' * (len(ways) + 1)}")
    for row in exponents:
        print(f"| {' | '.join(row)} |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("losses", nargs="*", metavar="LOSS", help=f"of {', '.join(LOSSES)}; all where none is named")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="the most classes")
    parser.add_argument("--batch", type=int, default=Batch().size)
    parser.add_argument("--dim", type=int, default=Batch().dim)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.losses) - set(LOSSES))
    if unknown:
        parser.error(f"unknown loss '{unknown[0]}' (known: {', '.join(LOSSES)})")
    return arguments


def exponent(milliseconds: dict[int, float]) -> str:
    if len(milliseconds) < 2:
        return "not measured"
    least, most = min(milliseconds), max(milliseconds)
    return f"{math.log(milliseconds[most] / milliseconds[least]) / math.log(most / least):.2f}"


def measured(loss: str, num_classes: int, num_workers: int, spread: bool, batch: Batch) -> tuple[float, float] | None:
    """Return the milliseconds of a step and the MiB of a worker, or None if it would not fit."""
    if bytes_needed(loss, num_classes, num_workers, spread, batch) > psutil.virtual_memory().available:
        return None
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        arguments = (num_workers, folder, loss, num_classes, spread, batch)
        workers = [context.Process(target=worker, args=(rank, *arguments)) for rank in range(num_workers)]
        for process in workers:
            process.start()
        for process in workers:
            process.join()
        assert all(process.exitcode == 0 for process in workers), "a worker failed"
        costs = [tuple(map(float, path.read_text().split())) for path in Path(folder).glob("cost-*")]
    return max(cost[0] for cost in costs), max(cost[1] for cost in costs)


def bytes_needed(loss: str, num_classes: int, num_workers: int, spread: bool, batch: Batch) -> float:
    """Return a rough upper estimate for all workers: eight tensors of the centres' shape and six of the similarities'."""
    centres = OPTIONS.get(loss, {}).get("num_centres", 1)
    parts = 1 if spread else num_workers  # number of copies of the centres
    samples = batch.size * (1 if spread else 1 / num_workers)
    at_the_start = num_workers * centres * num_classes * batch.dim * 4
    return max(at_the_start, centres * parts * num_classes * 4 * (8 * batch.dim + 6 * samples))


def worker(rank: int, num_workers: int, folder: str, loss: str, num_classes: int, spread: bool, batch: Batch) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_workers)
    cost(loss, 100, spread, batch)  # the libraries' memory at their first step is not the loss's
    milliseconds, mebibytes = cost(loss, num_classes, spread, batch)
    Path(folder, f"cost-{rank}").write_text(f"{milliseconds} {mebibytes}")
    dist.destroy_process_group()


def cost(loss: str, num_classes: int, spread: bool, batch: Batch) -> tuple[float, float]:
    """Return the milliseconds of the slowest worker's step, and the MiB of this one."""
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(0)
    images, labels_N = torch.randn(*batch, generator=random), torch.randint(num_classes, batch[:1], generator=random)
    sizes = shard_sizes(batch.size, num_workers)
    before = psutil.Process().memory_info().rss
    torch.manual_seed(0)
    system = TrainingSystem(nn.Linear(batch.dim, batch.dim), build_loss(loss, OPTIONS.get(loss, {}), num_classes, batch.dim))
    if spread:
        system.loss.shard_classes(ClassShard(tuple(shard_sizes(num_classes, num_workers)), rank))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    parallel: nn.Module = system
    if num_workers > 1:
        leave_to_their_worker(system, system)
        parallel = DistributedDataParallel(system)
    optimiser = torch.optim.Adam(system.parameters())
    seconds: list[float] = []
    for _ in range(MOST_STEPS):
        began = time.perf_counter()
        optimiser.zero_grad(set_to_none=True)
        output = parallel(torch.split(images, sizes)[rank], labels_N, sizes)
        torch.autograd.backward(output.total)
        optimiser.step()
        spent = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        seconds.append(float(spent))
        if len(seconds) > 2 and sum(seconds) > SECONDS:
            break
    return 1000 * statistics.median(seconds[1:]), (peak_bytes() - before) / MIB  # the first step warms up


def peak_bytes() -> int:
    """Return this process's peak memory since the last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
