"""Checkpoints that prove themselves, written whole or not at all, one per run folder: of an epoch's end or of a step in the middle of one.

A checkpoint is the zip file that `torch.save` writes, with the SHA-256 of all other bytes in the archive's comment (`unzip -z` shows it).
State and proof are one file and one rename, so no crash can leave them at odds, and `torch.load` reads it as any other. It also says which
run it is of, and holds the run's history so far and the weights of the earlier epochs that it keeps. What does not prove itself is never
gone on from.
"""

import hashlib
import os
import struct
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from dml_core.errors import StoreError
from dml_core.files import set_aside, writing
from dml_core.training.epochs import Epoch

CHECKPOINT_FILE = "checkpoint.pt"
_PROOF = b"sha256:"
_PROOF_BYTES = len(_PROOF) + 64
_BYTES_AT_ONCE = 2**20
_NO_COMMENT = struct.pack("<H", 0)  # how a zip file without a comment ends: the comment's length
_OUR_COMMENT = struct.pack("<H", _PROOF_BYTES)


def save_checkpoint(folder: Path, state: dict[str, Any]) -> Path:
    """Write `state` as the folder's checkpoint: to a file beside it, proven, flushed to disk, then renamed over it.

    Equal states are equal bytes.

    Raises:
        StoreError: the folder cannot be written; an earlier checkpoint is untouched.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with writing(folder / CHECKPOINT_FILE) as file:
            torch.save(state, file)
            _prove(file)
    except OSError as error:
        raise StoreError(f"{folder}: the checkpoint cannot be written ({error.strerror or error}); free or change the store") from None
    return folder / CHECKPOINT_FILE


def copied(state: Any) -> Any:
    """A copy of a state on the CPU, which steps that go on leave as it is; tensors become plain ones of the same values and layout."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


def load_checkpoint(folder: Path, identity: str | None = None) -> dict[str, Any] | None:
    """The folder's checkpoint on the CPU, or None where there is none.

    Args:
        folder: the run's.
        identity: of the run that the checkpoint must be of; any run's where none is given.

    Raises:
        StoreError: there is one that cannot be read, does not prove itself, or is another run's.
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
    """The state in a file whose bytes are proven; the file's bytes are never in memory as a whole."""
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever this torch has against bytes that are whole
        first_line = str(error).splitlines()[0]
        raise StoreError(f"{path}: whole, but torch {torch.__version__} cannot read it ({first_line}); begin anew with --force") from None
    return state


def weights_of(checkpoint: dict[str, Any], epoch: Epoch) -> tuple[dict[str, Tensor], int]:
    """A trained system's weights, and after how many epochs they were reached.

    Args:
        checkpoint: of a run that has ended.
        epoch: the last, or one that was kept beside it.

    Raises:
        StoreError: the run kept no such epoch.
    """
    if epoch == "last":
        return checkpoint.get("averaged") or checkpoint["system"], int(checkpoint["num_epochs_done"])
    kept = checkpoint.get("kept", {}).get(epoch)
    if kept is None:
        raise StoreError(f"the checkpoint of run {checkpoint['identity']} has no '{epoch}' epoch; train with keep_epochs: [{epoch}]")
    return kept["weights"], int(kept["num_epochs_done"])


class UnprovenError(StoreError):
    """A checkpoint that is damaged, or is not the run's."""


def take_up(folder: Path, identity: str) -> tuple[dict[str, Any] | None, str | None]:
    """What a run goes on from: the folder's checkpoint if it proves itself, else nothing, with the line that says so.

    A checkpoint that does not prove itself is renamed to `.checkpoint.pt.damaged-<N>`; the dot keeps it out of a step's records.

    Raises:
        StoreError: the checkpoint cannot be read or renamed, which a person has to mend: it may be whole.
    """
    try:
        return load_checkpoint(folder, identity), None
    except UnprovenError as error:
        found = str(error)
    try:
        aside = set_aside(folder / CHECKPOINT_FILE, hidden=True)
    except OSError as error:
        raise StoreError(f"{found}, and cannot be renamed ({error.strerror or error}); remove it") from None
    return None, f"{found}; kept as {aside.name}, and training begins from the initial weights"


def _prove(file: IO[bytes]) -> None:
    """Give the zip file a comment: the SHA-256 of everything before the comment."""
    file.seek(-len(_NO_COMMENT), os.SEEK_END)
    assert file.read() == _NO_COMMENT, "torch.save writes zip files without a comment"
    file.seek(-len(_NO_COMMENT), os.SEEK_END)
    file.write(_OUR_COMMENT)
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(0, os.SEEK_END)
    file.write(_PROOF + digest.encode())


def _is_proven(file: IO[bytes]) -> bool:
    """Whether the file ends in the SHA-256 of all bytes before it; leaves the file at its beginning."""
    num_left = max(0, file.seek(0, os.SEEK_END) - _PROOF_BYTES)
    file.seek(0)
    digest = hashlib.sha256()
    while num_left and (part := file.read(min(num_left, _BYTES_AT_ONCE))):
        digest.update(part)
        num_left -= len(part)
    is_proven = file.read() == _PROOF + digest.hexdigest().encode()
    file.seek(0)
    return is_proven
