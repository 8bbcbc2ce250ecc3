"""Time of a run: rates measured on this machine when a step ends, and estimates from them for the same or the nearest measured network.

`rates.jsonl` has one sealed record per line and is only appended to.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field

from dml_core.files import write_errors
from tasks.environment import num_cores
from tasks.runs.costs import FACT, Cost, total_cost
from tasks.runs.records import DatasetRecord, Record
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.sealed import DamagedError, or_set_aside, parse_sealed, read_bytes, seal
from tasks.wording import counted
from tasks.workers.placement import Placement, choose, num_gpus

RATES_FILE = "rates.jsonl"
START_SECONDS = 60.0  # of Prefect, Ray and workers
FEWEST_IMAGES = 500  # below it, a step's time is mostly start and end
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
OTHER_WORKERS = OTHER_SETTING = 0.01  # break ties: prefer a measurement with the same number of workers, and with the same settings

TimedStep = Literal["train", "embed"]
logger = logging.getLogger(__name__)


class Rate(Record):
    """A measured rate.

    Attributes:
        backbone, crop_size: the network, and the side of its input in pixels.
        device, num_workers: hardware and number of workers that it ran on.
        num_sharing: number of runs that shared its GPU, or on CPUs the cores; `runs_per_gpu` in older files, which have 1 for CPUs.
        images_per_second: of all workers together, as `num_images` counts, over the whole step: scores of the curve, checkpoints and short
            epochs included, so that an estimate from it includes them too.
        precision, recall_every_epochs: settings of a training that change its time; 0 epochs without a curve. None of an embedding, and in
            older files.
        cores: processors that it kept busy, on average; None if it was not recorded.
        watts: power of processors and GPUs, on average; None if it cannot be read here.
    """

    step: TimedStep
    backbone: str
    crop_size: int
    device: str
    num_workers: int
    num_sharing: int = Field(default=1, validation_alias=AliasChoices("num_sharing", "runs_per_gpu"))
    images_per_second: float
    precision: str | None = None
    recall_every_epochs: int | None = None
    cores: float | None = None
    watts: float | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Kind of the measurement: a later rate with the same key replaces it."""
        hardware = self.device, self.num_workers, self.num_sharing
        return self.step, self.backbone, self.crop_size, *hardware, self.precision, self.recall_every_epochs


@dataclass(frozen=True)
class Estimate:
    """An estimated duration.

    Attributes:
        seconds: None if no measurement applies.
        basis: what the estimate is based on, in words.
        cost: what these seconds are estimated to use; None if no measurement applies.
    """

    seconds: float | None
    basis: str
    cost: Cost | None = field(default=None, compare=False)


def input_size(spec: RunSpec) -> int:
    """Return the side of a run's input in pixels; 0 if images keep their own size."""
    transform = spec.training.transform
    resize = transform.train_resize
    return transform.crop_size or (resize if isinstance(resize, int) else max(resize or (0,)))


def num_images(step: TimedStep, spec: RunSpec, counts: dict[str, int]) -> int:
    """Return the number of images that a run embeds, or trains on in an epoch; of held-out classes, their share of the training images."""
    role = "train" if step == "train" else spec.evaluation.role
    if role == "test":
        return sum(count for role, count in counts.items() if role != "train")
    num_train, validation, num_held_out = counts.get("train", 0), spec.training.validation, 0
    if validation is not None:
        num_held_out = round(num_train * (validation.share or 1 / (validation.folds or 1)))
    return num_held_out if role == "validation" else num_train - num_held_out


def _num_passed(step: TimedStep, spec: RunSpec, counts: dict[str, int]) -> int:
    """Return the number of images that pass through the network in a step."""
    return num_images(step, spec, counts) * (spec.training.num_epochs if step == "train" else 1)


def _settings(step: TimedStep, spec: RunSpec, device: str) -> dict[str, Any]:
    """Return the settings of a training that change its time per image, as in a `Rate`; none for an embedding, which is float32."""
    training = spec.training
    if step == "embed":
        return {}
    is_float32 = training.precision == "float32" or (training.precision == "auto" and device == "cpu")
    return {"precision": "float32" if is_float32 else "bfloat16", "recall_every_epochs": training.recall_every_epochs or 0}


def note_rate(state: Path, step: TimedStep, spec: RunSpec, dataset: DatasetRecord, facts: dict[str, Any]) -> None:
    """Record the speed of a finished step, from the cost in its facts; steps with few images are skipped.

    Raises:
        StoreError: the file cannot be written.
    """
    cost = Cost.model_validate(facts[FACT])
    seconds = cost.wall_seconds - cost.lost_seconds
    if num_images(step, spec, dataset.counts) < FEWEST_IMAGES or seconds <= 0:
        return
    rate = Rate(
        step=step,
        backbone=spec.training.model.backbone.name,
        crop_size=input_size(spec),
        device=facts["device"],
        num_workers=facts["num_workers"],
        num_sharing=facts.get("num_sharing", 1),
        images_per_second=round(_num_passed(step, spec, dataset.counts) / seconds, 2),
        **_settings(step, spec, facts["device"]),
        cores=round(cost.cpu_seconds / cost.wall_seconds, 3),
        watts=None if cost.energy_joules is None else round(cost.energy_joules / cost.wall_seconds, 2),
    )
    path = state / RATES_FILE
    or_set_aside(path, partial(read_bytes, path))
    with write_errors(f"{path}:", "free space, or change DML_STATE"):
        state.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"\n{seal(rate.model_dump_json())}\n")  # the previous line may have been cut


def read_rates(state: Path) -> list[Rate]:
    """Return the last rate of each kind. Damaged lines stay in the file and are skipped; one warning counts them.

    Raises:
        NewerFormatError: a newer version of the program wrote one.
    """
    path = state / RATES_FILE
    rates: dict[object, Rate] = {}
    num_damaged = 0
    for line in filter(None, (or_set_aside(path, partial(read_bytes, path)) or b"").splitlines()):
        try:
            rate = parse_sealed(path, line, Rate)
            rates[rate.key] = rate
        except DamagedError:
            num_damaged += 1
    if num_damaged:
        logger.warning("%s: ignored %d damaged lines in the time estimates; without the file, times are measured again", path, num_damaged)
    return list(rates.values())


def placement_here(scale: ScaleSpec) -> Placement:
    """Return where a flow's runs would train on this machine, without querying a Ray cluster."""
    gpus = 0 if scale.device == "cpu" else max(num_gpus(), int(scale.device == "cuda"))
    return choose(scale, [{"CPU": num_cores(), "GPU": gpus}])


def step_estimate(step: TimedStep, spec: RunSpec, counts: dict[str, int], rates: Sequence[Rate], placement: Placement) -> Estimate:
    """Estimate how long a step of a run takes from rates measured on this machine; `counts` are the images of each role of its dataset."""
    if not counts:
        return Estimate(None, "no time estimate (dataset not prepared)")
    if _num_passed(step, spec, counts) == 0:  # the training of a frozen network
        return Estimate(0.0, "measured", Cost())
    backbone, size = spec.training.model.backbone.name, input_size(spec)
    comparable = [(rate, _ratio(rate, backbone, size)) for rate in rates if (rate.step, rate.device) == (step, placement.device)]
    if not any(ratio for _, ratio in comparable):
        return Estimate(None, "no time estimate (not measured here)")

    settings = _settings(step, spec, placement.device)

    def distance(rate: Rate, ratio: float) -> float:
        other_share = abs(math.log(rate.num_sharing / placement.num_sharing))
        num_others = sum(getattr(rate, name) != value for name, value in settings.items())
        ties = OTHER_WORKERS * (rate.num_workers != placement.num_workers) + OTHER_SETTING * num_others
        return abs(math.log(ratio)) + other_share + ties

    nearest, ratio = min(((rate, ratio) for rate, ratio in comparable if ratio), key=lambda pair: distance(*pair))
    seconds = _num_passed(step, spec, counts) * ratio / nearest.images_per_second
    cost = _cost(seconds, nearest, placement)
    same_hardware = (nearest.num_workers, nearest.num_sharing) == (placement.num_workers, placement.num_sharing)
    others = _other_settings(nearest, settings)
    if same_hardware and not others and (nearest.backbone, nearest.crop_size) == (backbone, size):
        return Estimate(seconds, "measured", cost)
    workers = "" if nearest.num_workers == placement.num_workers else f" with {counted(nearest.num_workers, 'worker')}"
    shared = "a GPU" if placement.device == "cuda" else "at a time"
    runs = "" if nearest.num_sharing == placement.num_sharing else f", {counted(nearest.num_sharing, 'run')} {shared}"
    return Estimate(seconds, f"from {nearest.backbone} at {nearest.crop_size} pixels{workers}{runs}{others}", cost)


def _other_settings(rate: Rate, settings: dict[str, Any]) -> str:
    """Return the recorded settings of a rate that differ from these, in words that follow others; empty if none does."""
    recorded = {name: getattr(rate, name) for name, value in settings.items() if getattr(rate, name) not in (None, value)}
    return "".join(f", {name} {value or 'null'}" for name, value in recorded.items())


def total(estimates: Sequence[Estimate], num_parallel: int = 1) -> Estimate:
    """Estimate how long several runs take, `num_parallel` at a time: never less than the longest; unknown if one of them is unknown."""
    bases = [basis for basis in dict.fromkeys(estimate.basis for estimate in estimates) if basis != "measured"]
    known = [estimate.seconds for estimate in estimates if estimate.seconds is not None]
    seconds = max(sum(known) / num_parallel, *known, 0.0) if len(known) == len(estimates) else None
    costs = [estimate.cost for estimate in estimates if estimate.cost is not None]
    return Estimate(seconds, ", ".join(bases) or "measured", total_cost(costs) if len(costs) == len(estimates) else None)


def _cost(seconds: float, rate: Rate, placement: Placement) -> Cost:
    """Return what a step of this duration uses, with the processors and the power of the rate's step."""
    return Cost(
        wall_seconds=seconds,
        cpu_seconds=seconds * (placement.num_workers if rate.cores is None else rate.cores),
        gpu_seconds=seconds * placement.num_workers * placement.resources.get("GPU", 0.0),
        energy_joules=None if rate.watts is None else seconds * rate.watts,
    )


def _ratio(rate: Rate, backbone: str, size: int) -> float | None:
    """Return the time per image as a multiple of the measured one, or None if the two cannot be compared."""
    if rate.backbone == backbone:
        return (size / rate.crop_size) ** 2 if size and rate.crop_size else float(size == rate.crop_size) or None
    if backbone not in BILLIONS or rate.backbone not in BILLIONS or not (size and rate.crop_size):
        return None
    return BILLIONS[backbone] / BILLIONS[rate.backbone] * (size / rate.crop_size) ** 2
