"""What a run says of itself: messages while it trains, and the history that it leaves. Light to import."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HISTORY_FILE = "history.jsonl"


@dataclass(frozen=True)
class Progress:
    """One message to whoever watches: where the run is. `checkpoint` is the folder of a checkpoint that was just written."""

    epoch: int
    num_epochs: int
    step: int
    num_steps: int
    images_per_second: float
    metrics: dict[str, float]
    epoch_ended: bool = False
    checkpoint: Path | None = None


Report = Callable[[Progress], None]


def read_history(folder: Path) -> list[dict[str, float]]:
    """The steps of a run: epoch, global step, learning-rate factor, loss and its parts. Empty for a run of no epochs."""
    path = folder / HISTORY_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
