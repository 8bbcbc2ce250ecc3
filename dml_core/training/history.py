"""What a run says of itself: messages while it trains, and the history that it leaves. Light to import."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dml_core.errors import StoreError

HISTORY_FILE = "history.jsonl"


@dataclass(frozen=True)
class Progress:
    """One message to whoever watches: where the run is.

    Attributes:
        note: a line that a person should read; such a message tells nothing else.
    """

    epoch: int
    num_epochs: int
    step: int
    num_steps: int
    images_per_second: float
    metrics: dict[str, float]
    epoch_ended: bool = False
    note: str | None = None


Report = Callable[[Progress], None]


def read_history(folder: Path) -> list[dict[str, float]]:
    """The steps of a run: epoch, global step, learning-rate factor, loss and its parts. Empty for a run of no epochs."""
    path = folder / HISTORY_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_history(folder: Path, lines: Sequence[str]) -> None:
    """Write the whole history, beside the file that is there, then rename: a reader sees whole steps only.

    Raises:
        StoreError: the folder cannot be written.
    """
    beside = folder / f".{HISTORY_FILE}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside.write_text("".join(f"{line}\n" for line in lines))
        beside.replace(folder / HISTORY_FILE)
    except OSError as error:
        raise StoreError(f"{folder}: the training history cannot be written ({error.strerror or error})") from None
