"""Benchmark the training loop on ResNet-50 at 224 pixels against a bare PyTorch loop of the same model and batch.

    .venv/bin/python benchmarks/training.py

The bare loop is the minimum of training: forward, loss, backward, optimiser step, over images already in memory. Ours reads and decodes
them, draws views, follows schedules and keeps a history. Their epochs alternate, so that other load on the machine affects both; the first
pair only warms up. Target: 0.97 of the bare loop's images per second on a CPU. On a GPU both use bfloat16, and further bare loops show the
effect of channels_last and torch.compile.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dml_core.config import parse
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.data.views.batches import Loader, TestView
from dml_core.training.config import TrainingConfig
from dml_core.training.history import Progress
from dml_core.training.loop import build_system, fit
from dml_core.training.optimisation.optimisers import build_optimiser

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NUM_CLASSES, BATCH_SIZE, NUM_STEPS, NUM_EPOCHS = 8, (64 if CUDA else 8), (40 if CUDA else 4), 14
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
    variants = {"plain": {}, "channels_last": {"channels_last": True}, "compiled": {"channels_last": True, "compiled": True}}
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_images(Path(folder))
        bare = {name: bare_loop(config, dataset, **options) for name, options in variants.items() if CUDA or name == "plain"}
        speeds: dict[str, list[float]] = {"ours": [], **{name: [] for name in bare}}

        def after_each_epoch(progress: Progress) -> None:
            if progress.epoch_ended:
                speeds["ours"].append(progress.images_per_second)
                for name, epoch in bare.items():
                    speeds[name].append(timed(epoch))

        fit(config, dataset, 0, Path(folder) / "run", DEVICE, num_loader_workers=8 if CUDA else 0, report=after_each_epoch)
    # The first pair warms up; our last epoch also writes the checkpoint.
    print(f"ResNet-50, 224 px, batch {BATCH_SIZE}, {DEVICE}, {NUM_STEPS} steps an epoch")
    print(f"ours: {statistics.median(speeds['ours'][1:-1]):.1f} images/s")
    for name in bare:
        ratios = [ours / theirs for ours, theirs in zip(speeds["ours"][1:-1], speeds[name][1:-1], strict=True)]
        print(
            f"bare, {name}: {statistics.median(speeds[name][1:-1]):.1f} images/s; ours / bare {statistics.median(ratios):.3f}"
            f" (median of {len(ratios)} pairs, {min(ratios):.3f} to {max(ratios):.3f})"
        )


def write_images(folder: Path) -> PackedDataset:
    """Write the drawn training images of an epoch; the other half of the classes is for testing."""
    options = {"num_classes": 2 * NUM_CLASSES, "images_per_class": BATCH_SIZE * NUM_STEPS // NUM_CLASSES, "image_size": 240}
    materialise("synthetic", options, folder / "raw")
    prepare("synthetic", folder / "raw", folder / "packed", options)
    return PackedDataset(folder / "packed", "train")


def bare_loop(config: TrainingConfig, dataset: PackedDataset, channels_last: bool = False, compiled: bool = False) -> Callable[[], None]:
    """Return a function for one epoch of the same system over the same images in memory, and nothing else."""
    batches = [torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE).numpy() for step in range(NUM_STEPS)]
    ready = [
        (to_device(images, channels_last), torch.from_numpy(dataset.labels[rows]).to(DEVICE))
        for images, rows in Loader(dataset).batches(batches, TestView(config.transform))
    ]
    system = build_system(config, NUM_CLASSES, 0, DEVICE).train()
    optimiser = build_optimiser(config.optimiser, system)
    model: Any = system.model.to(memory_format=torch.channels_last) if channels_last else system.model
    model = torch.compile(model) if compiled else model

    def epoch() -> None:
        for images, labels_N in ready:
            step(model, system.loss, optimiser, images, labels_N)

    return epoch


def step(model: nn.Module, loss: nn.Module, optimiser: torch.optim.Optimizer, images: Tensor, labels_N: Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=CUDA):
        total = loss(model(images), labels_N).total
    total.backward()
    optimiser.step()


def to_device(images: Tensor, channels_last: bool) -> Tensor:
    return images.to(DEVICE, memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def timed(epoch: Callable[[], None]) -> float:
    """Return the images per second of one epoch."""
    start = time.monotonic()
    epoch()
    if CUDA:
        torch.cuda.synchronize()
    return NUM_STEPS * BATCH_SIZE / (time.monotonic() - start)


if __name__ == "__main__":
    main()
