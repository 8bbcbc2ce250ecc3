"""Estimate a run's time from rates measured on this machine, for the same network or the nearest measured one."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.runs.rates import Rate, Step, input_size, num_images
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.workers.placement import Placement, choose

# 10^9 multiply-adds per image of 224 x 224 pixels, from the networks' papers and torchvision, to scale the time of another network.
# They are proportional to the input's area.
BILLIONS = {
    "bn_inception": 2.0,
    "googlenet": 1.5,
    "googlenet_caffe": 1.6,
    "inception_v1": 1.5,
    "resnet18": 1.8,
    "resnet34": 3.7,
    "resnet50": 4.1,
    "resnet101": 7.8,
    "vgg16": 15.5,
}
OTHER_WORKERS = 0.01  # breaks ties: prefers a measurement with the same number of workers


@dataclass(frozen=True)
class Estimate:
    """An estimated duration.

    Attributes:
        seconds: None if no measurement applies.
        basis: what the estimate is based on, in words.
    """

    seconds: float | None
    basis: str


def placement_here(scale: ScaleSpec) -> Placement:
    """Return where a flow's runs would train on this machine, without querying a Ray cluster."""
    gpus = 0 if scale.device == "cpu" else len(list(Path("/dev").glob("nvidia[0-9]*")))
    return choose(scale, {"CPU": os.cpu_count() or 1, "GPU": max(gpus, int(scale.device == "cuda"))})


def step_estimate(step: Step, spec: RunSpec, counts: dict[str, int], rates: Sequence[Rate], placement: Placement) -> Estimate:
    """Estimate how long a step of a run takes.

    Args:
        step: training, or embedding of the test images.
        spec: the run.
        counts: number of images of each role of its dataset.
        rates: rates measured on this machine.
        placement: devices and workers it would run on.
    """
    if not counts:
        return Estimate(None, "no time estimate (dataset not prepared)")
    backbone, size = spec.training.model.backbone.name, input_size(spec)
    known = [rate for rate in rates if rate.step == step and rate.device == placement.device and _ratio(rate, backbone, size) is not None]
    if not known:
        return Estimate(None, "no time estimate (not measured here)")

    def distance(rate: Rate) -> float:
        return abs(math.log(_ratio(rate, backbone, size) or 1.0)) + OTHER_WORKERS * (rate.num_workers != placement.num_workers)

    nearest = min(known, key=distance)
    seconds = num_images(step, counts, spec.training.num_epochs) * (_ratio(nearest, backbone, size) or 1.0) / nearest.images_per_second
    same = (nearest.backbone, nearest.crop_size, nearest.num_workers) == (backbone, size, placement.num_workers)
    workers = "" if nearest.num_workers == placement.num_workers else f" with {nearest.num_workers} workers"
    return Estimate(seconds, "measured" if same else f"from {nearest.backbone} at {nearest.crop_size} pixels{workers}")


def total(estimates: Sequence[Estimate]) -> Estimate:
    """Sum estimates; the sum is unknown if one of them is."""
    bases = [basis for basis in dict.fromkeys(estimate.basis for estimate in estimates) if basis != "measured"]
    seconds = [estimate.seconds for estimate in estimates]
    known = [value for value in seconds if value is not None]
    return Estimate(sum(known) if len(known) == len(seconds) else None, ", ".join(bases) or "measured")


def _ratio(rate: Rate, backbone: str, size: int) -> float | None:
    """Return the time per image as a multiple of the measured one, or None if the two cannot be compared."""
    if rate.backbone == backbone:
        return (size / rate.crop_size) ** 2 if size and rate.crop_size else float(size == rate.crop_size) or None
    if backbone not in BILLIONS or rate.backbone not in BILLIONS or not (size and rate.crop_size):
        return None
    return BILLIONS[backbone] / BILLIONS[rate.backbone] * (size / rate.crop_size) ** 2
