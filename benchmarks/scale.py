"""Benchmark a step's cost as a store grows from 10^4 to 10^6 images, and as classes grow; prints exponents, draws a figure.

    python benchmarks/scale.py images [--most 1000000]      # 0.8 GB in the temporary folder
    python benchmarks/scale.py classes [LOSS] [--workers 2] [--most 10000000]      # 18 GB of memory

Images: a store of small drawn pictures is packed once per size; then a separate process opens it up to its labels, draws an epoch (two
samplers, and how often each image came before), and loads a batch from random positions. Measured are the seconds of each, and the
process's own (anonymous) memory afterwards.

Classes, 10^4 to 10^7: a step is a linear layer instead of a network, the loss with centres of a batch of 32 embeddings of 32 dimensions
(with which 10^7 fit), the backward pass and Adam, on one worker; on several workers that each hold all classes and a part of the samples,
whose centres' gradients are averaged by DistributedDataParallel (the peer); and on several that each hold a part of the classes
(`shard_classes`). One thread per worker, all on the CPU of this machine. Time is the median step of the slowest worker. Memory is a
worker's peak during steps, centres and moments included, above its memory before it had a loss; the initial full set of centres, which is
cut, is not counted. Sizes that do not fit into free memory are not measured.

Exponent: e of cost ~ size^e, by least squares over the logarithms. Writes `docs/images/scale-images.png`, `scale-classes.png`.
"""

import argparse
import gc
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from measuring import ROOT, encoded, exponent, forget_peak, in_a_fresh_process, markdown_table, mebibytes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dml_core.data.prepare import pack
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Manifest, Row
from dml_core.data.views.batches import Loader, TrainView, count_copies
from dml_core.data.views.samplers import SamplerConfig, epoch_batches
from dml_core.data.views.transform_config import TransformConfig
from dml_core.figures.canvas import COLOURS, new_figure, style_axes, write_png
from dml_core.losses.class_shards import ClassShard
from dml_core.losses.registry import build_loss
from dml_core.training.parallel.sharded_state import leave_to_their_worker
from dml_core.training.parallel.workers import TrainingSystem, shard_sizes

LOSSES = ("normalised_softmax", "softtriple", "heated_up_softmax", "sgsl")
OPTIONS = {"softtriple": {"num_centres": 2}}
SIZES = {"images": (10_000, 100_000, 1_000_000), "classes": (10_000, 100_000, 1_000_000, 10_000_000)}
BATCH_SIZE, IMAGES_PER_CLASS, NUM_BATCHES = 128, 5, 20
COSTS = ("open, s", "shuffled epoch, s", "k by n epoch, s", "copies, s", "batch, s", "own memory, MiB")
NUM_SAMPLES, NUM_DIMENSIONS = 32, 32  # of the batch whose loss has many classes
MOST_STEPS, SECONDS = 7, 6.0
PRELOADED = [
    "dml_core.training.parallel.sharded_state",
    "dml_core.losses.sgsl",
    "dml_core.losses.softtriple",
    "torch._dynamo",
    "torch.distributed",
]
Table = dict[str, dict[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["images", "classes"])
    parser.add_argument("loss", nargs="?", choices=LOSSES, default=LOSSES[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--most", type=int, help="the largest size; all where it is left out")
    arguments = parser.parse_args()
    sizes = [size for size in SIZES[arguments.question] if size <= (arguments.most or size)]
    table = images(sizes) if arguments.question == "images" else classes(arguments.loss, arguments.workers, sizes)
    rows = [
        [name, *(f"{values[size]:.3g}" if size in values else "not measured" for size in sizes), exponent(values)]
        for name, values in table.items()
    ]
    print(markdown_table([arguments.question, *(f"{size:,}" for size in sizes), "exponent"], rows))
    draw(arguments.question, table)


# ---------------------------------------------------------------- images


def images(sizes: list[int]) -> Table:
    table: Table = {name: {} for name in ("pack, s", *COSTS)}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            write_store(Path(folder), size)
            table["pack, s"][size] = time.perf_counter() - began
            for name, value in in_a_fresh_process(costs_of_images, Path(folder)).items():
                table[name][size] = value
    return table


def write_store(folder: Path, size: int) -> None:
    """Write a hundred pictures of 16 by 16 pixels, each of them many times."""
    random = np.random.default_rng(0)
    files = [encoded(random.integers(0, 256, (16, 16, 3), dtype=np.uint8), "JPEG", quality=75) for _ in range(100)]
    rows = [Row(f"{n // IMAGES_PER_CLASS}/{n}.jpg", n // IMAGES_PER_CLASS, f"class {n // IMAGES_PER_CLASS}", "train") for n in range(size)]
    pack("folder", {}, Manifest(rows, lambda row: files[int(Path(row.path).stem) % len(files)]), folder)


def costs_of_images(folder: Path) -> dict[str, float]:
    before, costs, began = mebibytes("RssAnon"), [], time.perf_counter()

    def lap() -> None:
        nonlocal began
        costs.append(time.perf_counter() - began)
        began = time.perf_counter()

    dataset = PackedDataset(folder, "train")
    labels_N = dataset.labels
    dataset.box(0)
    lap()
    batches = epoch_batches(SamplerConfig(batch_size=BATCH_SIZE), labels_N, 0, 0)
    lap()
    epoch_batches(SamplerConfig(kind="k_by_n", num_classes_per_batch=32, num_samples_per_class=4), labels_N, 0, 0)
    lap()
    copies = count_copies(batches)
    lap()
    view = TrainView(TransformConfig(crop="padded", padding=2, crop_size=16, flip=True), 0, 0)
    for _ in Loader(dataset).batches(batches[:NUM_BATCHES], view, copies[:NUM_BATCHES]):
        pass
    lap()
    costs[-1] /= NUM_BATCHES
    return dict(zip(COSTS, [*costs, mebibytes("RssAnon") - before], strict=True))


# ---------------------------------------------------------------- classes


def classes(loss: str, num_workers: int, sizes: list[int]) -> Table:
    multiprocessing.set_forkserver_preload(PRELOADED)
    table: Table = {}
    for size in sizes:
        for name, workers, spread in (
            ("one worker", 1, False),
            (f"{num_workers} workers", num_workers, False),
            (f"spread over {num_workers}", num_workers, True),
        ):
            cost = measured(loss, size, workers, spread)
            if cost is not None:
                for unit, value in zip(("ms", "MiB"), cost, strict=True):
                    table.setdefault(f"{loss}, {name}, {unit}", {})[size] = value
    return table


def measured(loss: str, num_classes: int, num_workers: int, spread: bool) -> tuple[float, float] | None:
    """Return the milliseconds of a step and the MiB of a worker, or None if it would not fit."""
    if bytes_needed(loss, num_classes, num_workers, spread) > psutil.virtual_memory().available:
        return None
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        arguments = (num_workers, folder, loss, num_classes, spread)
        workers = [context.Process(target=worker, args=(rank, *arguments)) for rank in range(num_workers)]
        for process in workers:
            process.start()
        for process in workers:
            process.join()
        assert all(process.exitcode == 0 for process in workers), "a worker failed"
        costs = [tuple(map(float, path.read_text().split())) for path in Path(folder).glob("cost-*")]
    return max(cost[0] for cost in costs), max(cost[1] for cost in costs)


def bytes_needed(loss: str, num_classes: int, num_workers: int, spread: bool) -> float:
    """Return a rough upper estimate for all workers: eight tensors of the centres' shape and six of the similarities'."""
    centres = OPTIONS.get(loss, {}).get("num_centres", 1)
    parts = 1 if spread else num_workers  # number of copies of the centres
    samples = NUM_SAMPLES * (1 if spread else 1 / num_workers)
    at_the_start = num_workers * centres * num_classes * NUM_DIMENSIONS * 4
    return max(at_the_start, centres * parts * num_classes * 4 * (8 * NUM_DIMENSIONS + 6 * samples))


def worker(rank: int, num_workers: int, folder: str, loss: str, num_classes: int, spread: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_workers)
    cost(loss, 100, spread)  # the libraries' memory at their first step is not the loss's
    Path(folder, f"cost-{rank}").write_text(" ".join(map(str, cost(loss, num_classes, spread))))
    dist.destroy_process_group()


def cost(loss: str, num_classes: int, spread: bool) -> tuple[float, float]:
    """Return the milliseconds of the slowest worker's step, and the MiB of this one."""
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_SAMPLES, NUM_DIMENSIONS, generator=random)
    labels_N = torch.randint(num_classes, (NUM_SAMPLES,), generator=random)
    sizes = shard_sizes(NUM_SAMPLES, num_workers)
    before = mebibytes("VmRSS")
    torch.manual_seed(0)
    system = TrainingSystem(nn.Linear(NUM_DIMENSIONS, NUM_DIMENSIONS), build_loss(loss, OPTIONS.get(loss, {}), num_classes, NUM_DIMENSIONS))
    if spread:
        system.loss.shard_classes(ClassShard(tuple(shard_sizes(num_classes, num_workers)), rank))
    gc.collect()
    forget_peak()
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
    return 1000 * statistics.median(seconds[1:]), mebibytes("VmHWM") - before  # the first step warms up


# ---------------------------------------------------------------- the figure


def draw(question: str, table: Table) -> None:
    """Draw time on the left, memory on the right, with logarithmic axes."""
    figure = new_figure(9.6, 4.0)
    for axes, (label, is_memory) in zip(figure.subplots(1, 2), (("time", False), ("memory, MiB", True)), strict=True):
        shown = {name: values for name, values in table.items() if name.endswith("MiB") == is_memory and min(values.values()) > 0}
        for number, (name, values) in enumerate(shown.items()):
            text = f"{name} (exponent {exponent(values)})"
            axes.plot(list(values), list(values.values()), "o-", color=COLOURS[number % len(COLOURS)], label=text, markersize=4)
        axes.set(xscale="log", yscale="log", xlabel=question, ylabel=label)
        style_axes(axes)
        axes.legend(fontsize=7, frameon=False)
    write_png(figure, ROOT / f"docs/images/scale-{question}.png")


if __name__ == "__main__":
    main()
