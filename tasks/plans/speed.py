"""Time of a comparison on this machine, from a few training steps of its network on random pixels. Imports torch."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from dml_core.losses.registry import build_loss
from dml_core.models.embedder import Embedder
from dml_core.training.config import TrainingConfig
from dml_core.training.loop import autocast_of
from tasks.environment import num_cores
from tasks.plans.times import START_SECONDS, Estimate, Rate, TimedStep, input_size, placement_here, step_estimate, total
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.workers.placement import Placement

NUM_CLASSES, NUM_STEPS = 4, 2


def comparison_times(comparisons: Sequence[Sequence[RunSpec]], counts: Mapping[str, int], scale: ScaleSpec) -> list[Estimate]:
    """Estimate how long each comparison on one dataset takes on this machine, with as many runs at a time as `scale` allows.

    The runs of all comparisons have one network; `counts` are the images of each role.

    Raises:
        ConfigError: the network or a loss cannot be built.
    """
    placement = placement_here(scale)
    if placement.device == "cuda" and not torch.cuda.is_available():
        return [Estimate(None, "no time estimate (no GPU)")] * len(comparisons)
    longest = max((run for runs in comparisons for run in runs), key=lambda run: run.training.num_epochs)
    rates = measured_rates(longest, placement)

    def time_of(run: RunSpec) -> Estimate:
        steps: tuple[TimedStep, ...] = ("train", "embed")
        return total([step_estimate(step, run, dict(counts), rates, placement) for step in steps])

    times = [total([time_of(run) for run in runs], placement.num_groups) for runs in comparisons]
    return [replace(estimate, seconds=START_SECONDS + (estimate.seconds or 0.0)) for estimate in times]


def measured_rates(run: RunSpec, placement: Placement) -> list[Rate]:
    """Return the images per second of training and of embedding with a run's network, on one worker's share of this machine."""
    training, device = run.training, torch.device(placement.device)
    side = input_size(run)
    num_images = min(16, training.sampler.batch_size)
    images_NCHW = torch.randn(num_images, 3, side or 224, side or 224, device=device)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_cores() // (placement.num_workers * placement.num_groups)))
    try:
        train, embed = _steps(training, images_NCHW)
        speeds: dict[TimedStep, float] = {"train": num_images / _seconds(train, device), "embed": num_images / _seconds(embed, device)}
    finally:
        torch.set_num_threads(num_threads)
    return [
        Rate(
            step=step,
            backbone=training.model.backbone.name,
            crop_size=side,
            device=placement.device,
            num_workers=placement.num_workers,
            num_sharing=1 if placement.device == "cuda" else placement.num_sharing,  # one run's share of the cores, but a whole GPU
            images_per_second=speed * placement.num_workers,
        )
        for step, speed in speeds.items()
    ]


def _steps(training: TrainingConfig, images_NCHW: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a training step without the optimiser's, and an embedding of the same images."""
    network = Embedder(training.without_weights().model, NUM_CLASSES).to(images_NCHW.device)
    loss = build_loss(training.loss.name, training.loss.options, NUM_CLASSES, network.head.output_dim).to(images_NCHW.device)
    labels_N = torch.arange(len(images_NCHW), device=images_NCHW.device) // 2 % NUM_CLASSES

    autocast = autocast_of(training.precision, images_NCHW.device)

    def train() -> None:
        network.train()
        with autocast():
            total = loss(network(images_NCHW), labels_N).total
        total.backward()

    @torch.no_grad()
    def embed() -> None:
        network.eval()
        network.embed(images_NCHW)

    return train, embed


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one step, after one that is not counted."""
    step()
    began = _now(device)
    for _ in range(NUM_STEPS):
        step()
    return (_now(device) - began) / NUM_STEPS


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
