"""Benchmark `precision: bfloat16` on a CPU with instructions for it: speed gained, and Recall@1 lost.

    python benchmarks/bfloat16.py [--seeds 6]

A step of ResNet-50 at 224 pixels and of `small_cnn` at 32, forward, loss, backward and optimiser, in both precisions alternately. Then
whole runs of `small_cnn` with the normalised softmax on drawn images, with the same seeds in both precisions: Recall@1 on classes not used
for training, and the mean of the paired differences with its standard error.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import bare_step, markdown_table

from dml_core.config import parse
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.training.config import TrainingConfig
from dml_core.training.loop import build_system, fit
from dml_core.training.optimisation.optimisers import build_optimiser
from dml_core.training.validation import HeldOutRecall, ScoredImages

CPU = torch.device("cpu")
PRECISIONS = ("float32", "bfloat16")
DRAWN = {"num_classes": 60, "images_per_class": 12, "image_size": 32}
SETTINGS: dict[str, Any] = {
    "model": {"backbone": {"name": "small_cnn", "width": 32}, "head": {"kind": "linear", "embedding_dim": 64}},
    "loss": {"name": "normalised_softmax"},
    "sampler": {"batch_size": 64},
    "transform": {"crop": "padded", "crop_size": 32, "padding": 4, "flip": True, "scaling": "minus-one-one"},
    "optimiser": {"name": "adam", "learning_rate": 3e-3},
    "num_epochs": 15,
    "checkpoint_every_epochs": 15,
}
STEPS: dict[str, tuple[dict[str, Any], int, int, int]] = {  # backbone, side, batch, steps per turn
    "ResNet-50": ({"name": "resnet50"}, 224, 8, 1),
    "small_cnn": ({"name": "small_cnn", "width": 32}, 32, 64, 20),
}
TURNS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    arguments = parser.parse_args()
    flags = set(Path("/proc/cpuinfo").read_text().split())
    has = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, instructions: {', '.join(has) or 'none for bfloat16'}")
    rows = []
    for name, (backbone, side, batch_size, num_steps) in STEPS.items():
        seconds = step_seconds(backbone, side, batch_size, num_steps)
        ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
        times = (f"{1000 * statistics.median(values):.1f}" for values in seconds.values())
        rows.append([f"{name}, {side} px, batch {batch_size}", *times, f"{ratio:.2f}"])
    print(f"\n{markdown_table(['step', 'float32, ms', 'bfloat16, ms', 'float32 / bfloat16'], rows)}", flush=True)
    recalls: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    with tempfile.TemporaryDirectory() as folder:
        materialise("synthetic", DRAWN, Path(folder) / "raw")
        prepare("synthetic", Path(folder) / "raw", Path(folder) / "packed", DRAWN)
        for seed in range(arguments.seeds):
            for precision in PRECISIONS:
                recalls[precision].append(recall(Path(folder), seed, precision))
    differences = [half - full for full, half in zip(recalls["float32"], recalls["bfloat16"], strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    means = [f"{statistics.mean(values):.4f}" for values in recalls.values()]
    row = [f"{len(differences)} seeds", *means, f"{statistics.mean(differences):+.4f}, standard error {error:.4f}"]
    print(f"\n{markdown_table(['Recall@1, mean of seeds', *PRECISIONS, 'difference of pairs'], [row])}")


def step_seconds(backbone: dict[str, Any], side: int, batch_size: int, num_steps: int) -> dict[str, list[float]]:
    """Return the seconds of a step in each turn."""
    config = parse(TrainingConfig, SETTINGS | {"model": {"backbone": backbone}}, "benchmark")
    system = build_system(config, DRAWN["num_classes"], 0, CPU).train()
    optimiser = build_optimiser(config.optimiser, system)
    images, labels_N = torch.randn(batch_size, 3, side, side), torch.arange(batch_size) % DRAWN["num_classes"]
    seconds: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for turn in range(TURNS):
        for precision in PRECISIONS:
            autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16")
            began = time.perf_counter()
            for _ in range(num_steps):
                bare_step(system, optimiser, images, labels_N, autocast)
            if turn > 0:  # the first turn warms up
                seconds[precision].append((time.perf_counter() - began) / num_steps)
    return seconds


def recall(folder: Path, seed: int, precision: str) -> float:
    """Return Recall@1 on classes not used for training, scored in float32."""
    config = parse(TrainingConfig, SETTINGS | {"precision": precision}, "benchmark")
    system = fit(config, PackedDataset(folder / "packed", "train"), seed, folder / f"{precision}-{seed}", CPU)
    return next(iter(HeldOutRecall(ScoredImages(CPU), PackedDataset(folder / "packed", "test"), config.transform)(system.model).values()))


if __name__ == "__main__":
    main()
