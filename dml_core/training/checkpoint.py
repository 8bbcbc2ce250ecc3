"""Checkpoints written whole or not at all, one per run folder: the last finished epoch."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from dml_core.errors import StoreError

CHECKPOINT_FILE = "checkpoint.pt"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> Path:
    """Write `state` as the folder's checkpoint: to a file beside it, flushed to disk, then renamed over it.

    Raises:
        StoreError: the folder cannot be written; an earlier checkpoint is untouched.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".checkpoint-", delete=False) as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(folder / CHECKPOINT_FILE)
    except OSError as error:
        raise StoreError(f"{folder}: the checkpoint cannot be written ({error.strerror or error}); free or change the store") from None
    return folder / CHECKPOINT_FILE


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The folder's checkpoint on the CPU, or None where there is none.

    Raises:
        StoreError: there is one, but it cannot be read.
    """
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch.load raises whatever the bytes lead its unpickler to
        raise StoreError(f"{path}: not a readable checkpoint ({str(error).splitlines()[0]}); delete it to start the run anew") from None
    return state
