"""Progress messages and the training history of a run. Light to import."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dml_core.files import write_errors, writing

HISTORY_FILE = "history.jsonl"


@dataclass(frozen=True)
class Progress:
    """A progress message.

    Attributes:
        metrics: during an epoch the last step's loss on rank 0's images, at its end the epoch's means over all workers.
        note: a line for the user, that a checkpoint is rejected and training starts from the beginning; its other fields are
            meaningless.
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
    """Read the steps of a run: epoch, global step, learning-rate factor, loss and its parts. Empty for a run of no epochs."""
    path = folder / HISTORY_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_history(folder: Path, lines: Sequence[str]) -> None:
    """Replace the history file atomically, so that readers see only complete steps.

    Raises:
        StoreError: the folder cannot be written.
    """
    with write_errors(f"{folder}: the training history", "free or change the store"):
        folder.mkdir(parents=True, exist_ok=True)
        with writing(folder / HISTORY_FILE) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
