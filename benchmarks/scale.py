"""Benchmark a step's cost as a store grows from 10^4 to 10^6 images, and as classes grow; prints exponents, draws a figure.

    python benchmarks/scale.py images [--most 1000000]      # 0.8 GB in the temporary folder
    python benchmarks/scale.py classes [LOSS] [--workers 2] [--most 10000000]      # 18 GB of memory

Images: a store of small drawn pictures is packed once per size; then a separate process opens it up to its labels, draws an epoch (two
samplers, and how often each image came before), and loads a batch from random positions. Measured are the seconds of each, and the
process's own (anonymous) memory afterwards. Classes, 10^4 to 10^7: step and memory of `benchmarks/classes.py` on one worker, on several
that each hold all classes, and spread; a batch of 32 embeddings of 32 dimensions, with which 10^7 fit.
Exponent: e of cost ~ size^e, by least squares over the logarithms. Writes `docs/images/scale-images.png`, `scale-classes.png`.
"""

import argparse
import io
import os
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dml_core.data.prepare import pack
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Manifest, Row
from dml_core.data.views.batches import Loader, TrainView, count_copies
from dml_core.data.views.samplers import SamplerConfig, epoch_batches
from dml_core.data.views.transform_config import TransformConfig
from dml_core.figures.canvas import COLOURS, new_figure, write_png

FIGURES = Path(__file__).parents[1] / "docs/images"
SIZES = {"images": (10_000, 100_000, 1_000_000), "classes": (10_000, 100_000, 1_000_000, 10_000_000)}
BATCH_SIZE, IMAGES_PER_CLASS, NUM_BATCHES = 128, 5, 20
COSTS = ("open, s", "shuffled epoch, s", "k by n epoch, s", "copies, s", "batch, s", "own memory, MiB")
Table = dict[str, dict[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["images", "classes"])
    parser.add_argument("loss", nargs="?", default="normalised_softmax")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--most", type=int, help="the largest size; all where it is left out")
    arguments = parser.parse_args()
    sizes = [size for size in SIZES[arguments.question] if size <= (arguments.most or size)]
    table = images(sizes) if arguments.question == "images" else classes(arguments.loss, arguments.workers, sizes)
    print_table(arguments.question, table, sizes)
    draw(arguments.question, table)


def images(sizes: list[int]) -> Table:
    table: Table = {name: {} for name in ("pack, s", *COSTS)}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            began = time.perf_counter()
            write_store(Path(folder), size)
            table["pack, s"][size] = time.perf_counter() - began
            for name, value in pool.apply(costs_of_images, (Path(folder),)).items():
                table[name][size] = value
    return table


def write_store(folder: Path, size: int) -> None:
    """Write a hundred pictures of 16 by 16 pixels, each of them many times."""
    random, encoded = np.random.default_rng(0), []
    for _ in range(100):
        buffer = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(buffer, "JPEG", quality=75)
        encoded.append(buffer.getvalue())
    rows = [Row(f"{n // IMAGES_PER_CLASS}/{n}.jpg", n // IMAGES_PER_CLASS, f"class {n // IMAGES_PER_CLASS}", "train") for n in range(size)]
    pack("folder", {}, Manifest(rows, lambda row: encoded[int(Path(row.path).stem) % len(encoded)]), folder)


def costs_of_images(folder: Path) -> dict[str, float]:
    before, costs, began = own_mebibytes(), [], time.perf_counter()

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
    return dict(zip(COSTS, [*costs, own_mebibytes() - before], strict=True))


def own_mebibytes() -> float:
    line = next(line for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def classes(loss: str, num_workers: int, sizes: list[int]) -> Table:
    from classes import Batch, measured  # in this file's folder

    table: Table = {}
    for size in sizes:
        for name, workers, spread in (
            ("one worker", 1, False),
            (f"{num_workers} workers", num_workers, False),
            (f"spread over {num_workers}", num_workers, True),
        ):
            cost = measured(loss, size, workers, spread, Batch(32, 32))
            if cost is not None:
                for unit, value in zip(("ms", "MiB"), cost, strict=True):
                    table.setdefault(f"{loss}, {name}, {unit}", {})[size] = value
    return table


def print_table(question: str, table: Table, sizes: list[int]) -> None:
    print(f"| {question} | {' | '.join(f'{size:,}' for size in sizes)} | exponent |\n|{'---|' * (len(sizes) + 2)}")
    for name, values in table.items():
        cells = [f"{values[size]:.3g}" if size in values else "not measured" for size in sizes]
        print(f"| {name} | {' | '.join(cells)} | {exponent(values)} |")


def exponent(values: dict[int, float]) -> str:
    if len(values) < 2 or min(values.values()) <= 0:
        return "-"
    slope: Any = np.polyfit(np.log(list(values)), np.log(list(values.values())), 1)[0]
    return f"{slope:.2f}"


def draw(question: str, table: Table) -> None:
    """Draw time on the left, memory on the right, with logarithmic axes."""
    figure = new_figure(9.6, 4.0)
    for axes, (label, is_memory) in zip(figure.subplots(1, 2), (("time", False), ("memory, MiB", True)), strict=True):
        shown = {name: values for name, values in table.items() if name.endswith("MiB") == is_memory and min(values.values()) > 0}
        for number, (name, values) in enumerate(shown.items()):
            text = f"{name} (exponent {exponent(values)})"
            axes.plot(list(values), list(values.values()), "o-", color=COLOURS[number % len(COLOURS)], label=text, markersize=4)
        axes.set(xscale="log", yscale="log", xlabel=question, ylabel=label)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    write_png(figure, FIGURES / f"scale-{question}.png")


if __name__ == "__main__":
    main()
