"""Runs that stop at an epoch's end, and the comparison of what they leave."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dml_core.training.checkpoints.file import load_checkpoint
from dml_core.training.history import Progress, Report


class StoppedError(Exception):
    """Raised by `stop_after`."""


def stop_after(num_epochs: int) -> Report:
    """Return a report that ends a run after so many epochs."""

    def stop(progress: Progress) -> None:
        if progress.epoch_ended and progress.epoch + 1 == num_epochs:
            raise StoppedError

    return stop


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two state dictionaries are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def checkpoint_of(folder: Path) -> dict[str, Any]:
    """Return the checkpoint of a run that has one."""
    found = load_checkpoint(folder)
    assert found is not None
    return found
