"""Benchmark the training loop on ResNet-50 at 224 pixels, on a CPU, against a bare PyTorch loop of the same model and batch.

    .venv/bin/python benchmarks/training.py

The bare loop is the minimum of training: forward, loss, backward, optimiser step, over images already in memory. Ours reads and decodes
them, draws views, follows schedules and keeps a history. Their epochs alternate, so that other load on the machine affects both; the first
pair only warms up. Target: 0.97 of the bare loop's images per second. `benchmarks/gpu.py` compares them on a GPU.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import bare_step

from dml_core.config import parse
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.data.views.batches import Loader, TestView
from dml_core.training.config import TrainingConfig
from dml_core.training.history import Progress
from dml_core.training.loop import build_system, fit
from dml_core.training.optimisation.optimisers import build_optimiser

CPU = torch.device("cpu")
NUM_CLASSES, BATCH_SIZE, NUM_STEPS, NUM_EPOCHS = 8, 8, 4, 14
SETTINGS: dict[str, Any] = {
    "model": {"backbone": {"name": "resnet50"}, "head": {"kind": "linear", "embedding_dim": 512}},
    "loss": {"name": "normalised_softmax"},
    "sampler": {"batch_size": BATCH_SIZE},
    "transform": {"crop": "random", "crop_size": 224, "flip": True},
    "optimiser": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9},
    "num_epochs": NUM_EPOCHS,
    "checkpoint_every_epochs": NUM_EPOCHS,
}


def main() -> None:
    config = parse(TrainingConfig, SETTINGS, "benchmark")
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_images(Path(folder))
        bare_epoch = bare_loop(config, dataset)
        ours: list[float] = []
        bare: list[float] = []

        def after_each_epoch(progress: Progress) -> None:
            if progress.epoch_ended:
                ours.append(progress.images_per_second)
                start = time.monotonic()
                bare_epoch()
                bare.append(NUM_STEPS * BATCH_SIZE / (time.monotonic() - start))

        fit(config, dataset, 0, Path(folder) / "run", CPU, report=after_each_epoch)
    ours, bare = ours[1:-1], bare[1:-1]  # the first pair warms up; our last epoch also writes the checkpoint
    ratios = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    print(f"ResNet-50, 224 px, batch {BATCH_SIZE}, {NUM_STEPS} steps an epoch")
    print(f"ours: {statistics.median(ours):.1f} images/s")
    print(
        f"bare: {statistics.median(bare):.1f} images/s; ours / bare {statistics.median(ratios):.3f}"
        f" (median of {len(ratios)} pairs, {min(ratios):.3f} to {max(ratios):.3f})"
    )


def write_images(folder: Path) -> PackedDataset:
    """Write the drawn training images of an epoch; the other half of the classes is for testing."""
    options = {"num_classes": 2 * NUM_CLASSES, "images_per_class": BATCH_SIZE * NUM_STEPS // NUM_CLASSES, "image_size": 240}
    materialise("synthetic", options, folder / "raw")
    prepare("synthetic", folder / "raw", folder / "packed", options)
    return PackedDataset(folder / "packed", "train")


def bare_loop(config: TrainingConfig, dataset: PackedDataset) -> Callable[[], None]:
    """Return a function for one epoch of the same system over the same images in memory, and nothing else."""
    batches = [torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE).numpy() for step in range(NUM_STEPS)]
    loaded = Loader(dataset).batches(batches, TestView(config.transform))
    ready = [(images, torch.from_numpy(dataset.labels[rows])) for images, rows in loaded]
    system = build_system(config, NUM_CLASSES, 0, CPU).train()
    optimiser = build_optimiser(config.optimiser, system)

    def epoch() -> None:
        for images, labels_N in ready:
            bare_step(system, optimiser, images, labels_N)

    return epoch


if __name__ == "__main__":
    main()
