"""Checkpoints verified by hash and written atomically, one per run folder, at the end or in the middle of an epoch.

A checkpoint is the zip file that `torch.save` writes, with the SHA-256 of all other bytes in the archive's comment (`unzip -z` shows it).
State and hash are one file and one rename, so a crash cannot make them inconsistent, and `torch.load` reads it like any other. It also
contains the run's identity, its history so far and the weights of the earlier epochs that it keeps. A run never resumes from a checkpoint
that fails verification.
"""

import hashlib
import os
import struct
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from dml_core.epochs import Epoch
from dml_core.errors import StoreError, first_line
from dml_core.files import set_aside, writing

CHECKPOINT_FILE = "checkpoint.pt"
_PROOF = b"sha256:"
_PROOF_BYTES = len(_PROOF) + 64
_BYTES_AT_ONCE = 2**20
_NO_COMMENT = struct.pack("<H", 0)  # end of a zip file without a comment: the comment's length
_OUR_COMMENT = struct.pack("<H", _PROOF_BYTES)


def save_checkpoint(folder: Path, state: dict[str, Any]) -> Path:
    """Write `state` as the folder's checkpoint: to a temporary file, with its hash, flushed to disk, then renamed.

    Equal states give equal bytes.

    Raises:
        StoreError: the folder cannot be written; an earlier checkpoint is unchanged.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with writing(folder / CHECKPOINT_FILE) as file:
            torch.save(state, file)
            _prove(file)
    except (OSError, RuntimeError) as error:  # torch hides the error of a write behind its own
        reason = getattr(error, "strerror", None) or error.__context__ or first_line(error)
        raise StoreError(f"{folder}: the checkpoint cannot be written ({reason}); free or change the store") from None
    return folder / CHECKPOINT_FILE


def copied(state: Any) -> Any:
    """Copy a state to the CPU, unaffected by later steps; tensors become plain ones with the same values and layout."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


def load_checkpoint(folder: Path, identity: str | None = None) -> dict[str, Any] | None:
    """Load the folder's checkpoint on the CPU, or return None if there is none.

    Args:
        folder: the run's folder.
        identity: identity of the run that the checkpoint must belong to; None accepts any.

    Raises:
        StoreError: the checkpoint cannot be read, is damaged or belongs to another run.
    """
    path = folder / CHECKPOINT_FILE
    try:
        with path.open("rb") as file:
            if not _is_proven(file):
                raise UnprovenError(f"{path}: the checkpoint is damaged (its bytes do not fit its SHA-256)")
            state = _read(path, file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: the checkpoint cannot be read ({error.strerror or error})") from None
    if identity not in (None, state.get("identity")):
        raise UnprovenError(f"{path}: the checkpoint is another run's ({state.get('identity')})")
    return state


def _read(path: Path, file: IO[bytes]) -> dict[str, Any]:
    """Read the state from a verified file without holding the file's bytes in memory as a whole."""
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - this torch version may raise anything, even for undamaged bytes
        reason = first_line(error)
        raise StoreError(f"{path}: whole, but torch {torch.__version__} cannot read it ({reason}); train again with --force") from None
    return state


def weights_of(checkpoint: dict[str, Any], epoch: Epoch) -> tuple[dict[str, Tensor], int]:
    """Return a trained system's weights and the number of epochs after which they were reached.

    Args:
        checkpoint: of a completed run.
        epoch: the last epoch, or a kept one.

    Raises:
        StoreError: the run did not keep this epoch.
    """
    if epoch == "last":
        return checkpoint.get("averaged") or checkpoint["system"], int(checkpoint["num_epochs_done"])
    kept = checkpoint.get("kept", {}).get(epoch)
    if kept is None:
        raise StoreError(f"the checkpoint of run {checkpoint['identity']} has no '{epoch}' epoch; train with keep_epochs: [{epoch}]")
    return kept["weights"], int(kept["num_epochs_done"])


class UnprovenError(StoreError):
    """A checkpoint that is damaged or belongs to another run."""


def resumable_checkpoint(folder: Path, identity: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return the folder's verified checkpoint to resume from, or None and a message if it was rejected.

    A rejected checkpoint is renamed to `.checkpoint.pt.damaged-<N>`; the dot excludes it from a step's records.

    Raises:
        StoreError: the checkpoint cannot be read or renamed; the user has to fix this, since it may be undamaged.
    """
    try:
        return load_checkpoint(folder, identity), None
    except UnprovenError as error:
        problem = str(error)
    try:
        aside = set_aside(folder / CHECKPOINT_FILE, hidden=True)
    except OSError as error:
        raise StoreError(f"{problem}, and cannot be renamed ({error.strerror or error}); remove it") from None
    return None, f"{problem}; kept as {aside.name}, and training begins from the initial weights"


def _prove(file: IO[bytes]) -> None:
    """Set the zip file's comment to the SHA-256 of everything before the comment."""
    file.seek(-len(_NO_COMMENT), os.SEEK_END)
    assert file.read() == _NO_COMMENT, "torch.save writes zip files without a comment"
    file.seek(-len(_NO_COMMENT), os.SEEK_END)
    file.write(_OUR_COMMENT)
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(0, os.SEEK_END)
    file.write(_PROOF + digest.encode())


def _is_proven(file: IO[bytes]) -> bool:
    """Return whether the file ends in the SHA-256 of all bytes before it; leaves the file at its beginning."""
    num_left = max(0, file.seek(0, os.SEEK_END) - _PROOF_BYTES)
    file.seek(0)
    digest = hashlib.sha256()
    while num_left and (part := file.read(min(num_left, _BYTES_AT_ONCE))):
        digest.update(part)
        num_left -= len(part)
    is_proven = file.read() == _PROOF + digest.hexdigest().encode()
    file.seek(0)
    return is_proven
