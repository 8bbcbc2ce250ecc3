"""Measured speed of training and embedding on this machine, recorded when a step ends and read for time estimates.

`rates.jsonl` has one sealed record per line and is only appended to; lines without a seal were written before seals existed.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from dml_core.errors import StoreError
from tasks.runs.records import DatasetRecord, Record
from tasks.runs.specs import RunSpec
from tasks.sealed import DamagedError, or_set_aside, parse_sealed, read_bytes, seal

RATES_FILE = "rates.jsonl"
FEWEST_IMAGES = 500  # below it, a step's time is mostly start and end

Step = Literal["train", "embed"]
logger = logging.getLogger(__name__)


class Rate(Record):
    """A measured rate.

    Attributes:
        backbone, crop_size: the network, and the side of its input in pixels.
        device, num_workers: hardware and number of workers that it ran on.
        images_per_second: of all workers together.
    """

    step: Step
    backbone: str
    crop_size: int
    device: str
    num_workers: int
    images_per_second: float

    @property
    def of(self) -> tuple[str, str, int, str, int]:
        """Key of the rate: a later rate with the same key replaces it."""
        return self.step, self.backbone, self.crop_size, self.device, self.num_workers


_RATE = TypeAdapter(Rate)


def input_size(spec: RunSpec) -> int:
    """Return the side of a run's input in pixels; 0 if images keep their own size."""
    transform = spec.training.transform
    resize = transform.train_resize
    return transform.crop_size or (resize if isinstance(resize, int) else max(resize or (0,)))


def num_images(step: Step, counts: dict[str, int], num_epochs: int = 1) -> int:
    """Return the number of images that pass through the network in a step."""
    return num_epochs * counts["train"] if step == "train" else sum(count for role, count in counts.items() if role != "train")


def note_rate(state: Path, step: Step, spec: RunSpec, dataset: DatasetRecord, facts: dict[str, Any], images_per_second: float) -> None:
    """Record the speed of a step; steps with few images are skipped."""
    if num_images(step, dataset.counts) < FEWEST_IMAGES or images_per_second <= 0:
        return
    rate = Rate(
        step=step,
        backbone=spec.training.model.backbone.name,
        crop_size=input_size(spec),
        device=facts["device"],
        num_workers=facts["num_workers"],
        images_per_second=round(images_per_second, 2),
    )
    path = state / RATES_FILE
    or_set_aside(path, partial(read_bytes, path))
    try:
        state.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"\n{seal(rate.model_dump_json())}\n")  # the previous line may have been cut
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror or error}); free space, or change DML_STATE") from None


def read_rates(state: Path) -> list[Rate]:
    """Return the last rate of each kind. Damaged lines stay in the file and are skipped; one warning counts them.

    Raises:
        NewerFormatError: a newer version of the program wrote one.
    """
    path = state / RATES_FILE
    found: dict[object, Rate] = {}
    num_damaged = 0
    for line in filter(None, (or_set_aside(path, partial(read_bytes, path)) or b"").splitlines()):
        try:
            rate = _parsed(path, line)
        except DamagedError:
            num_damaged += 1
        else:
            found[rate.of] = rate
    if num_damaged:
        logger.warning("%s: ignored %d damaged lines in the time estimates", path, num_damaged)
    return list(found.values())


def _parsed(path: Path, line: bytes) -> Rate:
    try:
        return _RATE.validate_json(line)  # without a seal
    except ValidationError:
        return parse_sealed(path, line, _RATE)
