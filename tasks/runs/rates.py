"""How fast networks trained and embedded on this machine: kept in the state when a step ends, read by whoever says how long others take."""

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tasks.runs.records import DatasetRecord, Record
from tasks.runs.specs import RunSpec

RATES_FILE = "rates.jsonl"
FEWEST_IMAGES = 500  # below it a step's time is its beginning and its end

Step = Literal["train", "embed"]


class Rate(Record):
    """A measured rate.

    Attributes:
        backbone, crop_size: the network, and the side of its input in pixels.
        device, num_workers: what it ran on.
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
        """What it is the rate of: a later one takes over from it."""
        return self.step, self.backbone, self.crop_size, self.device, self.num_workers


def input_size(spec: RunSpec) -> int:
    """The side of a run's input in pixels; 0 where the images go in as they are."""
    transform = spec.training.transform
    resize = transform.train_resize
    return transform.crop_size or (resize if isinstance(resize, int) else max(resize or (0,)))


def num_images(step: Step, counts: dict[str, int], num_epochs: int = 1) -> int:
    """How many images go through the network in a step."""
    return num_epochs * counts["train"] if step == "train" else sum(count for role, count in counts.items() if role != "train")


def note_rate(state: Path, step: Step, spec: RunSpec, dataset: DatasetRecord, facts: dict[str, Any], images_per_second: float) -> None:
    """Keep how fast a step was; nothing of one that had few images."""
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
    state.mkdir(parents=True, exist_ok=True)
    with (state / RATES_FILE).open("a") as file:
        file.write(f"{rate.model_dump_json()}\n")


def read_rates(state: Path) -> list[Rate]:
    """The last rate of each kind; lines that are damaged are passed over."""
    path = state / RATES_FILE
    found: dict[object, Rate] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rate = Rate.model_validate_json(line)
        except ValidationError:
            continue
        found[rate.of] = rate
    return list(found.values())
