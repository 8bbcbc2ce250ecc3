"""Folder of a run's extracted embeddings, shards and a manifest: written by `tasks.workers.embedding`, read by `tasks.scores`."""

import json
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from dml_core.errors import StoreError
from tasks.files import write_whole
from tasks.runs.records import Record, changed_file
from tasks.sealed import read_bytes

MANIFEST_FILE = "manifest.json"
KEPT_EPOCH_FILE = "kept_epoch.json"
KEPT_EPOCH = "kept_epoch"  # name of the score: number of epochs after which the weights were reached


class RoleEntry(Record):
    """One role in the manifest: number of rows, and file names; `dml embed` writes no labels for images without classes."""

    rows: int
    dimensions: int
    shards: tuple[str, ...]
    labels: str | None = None


_MANIFEST = TypeAdapter(dict[str, RoleEntry])
_KEPT_EPOCH = TypeAdapter(dict[str, float])


def read_manifest(folder: Path) -> dict[str, RoleEntry]:
    """Return role -> entry of a folder of extracted embeddings with classes.

    Raises:
        StoreError: the manifest is missing or damaged.
    """
    path = folder / MANIFEST_FILE
    try:
        found = _MANIFEST.validate_json(read_bytes(path) or b"")
    except ValidationError:
        found = {}
    if not found:
        raise changed_file(path)
    return found


def load_embeddings(folder: Path, role: str) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings (N, D) float32 and labels (N,) int64 of a role, in dataset order.

    Raises:
        StoreError: a file is missing or damaged.
    """
    entry = read_manifest(folder).get(role)
    if entry is None or entry.labels is None:
        raise StoreError(f"{folder}: no embeddings of {role} with labels there; extract them again")
    rows_ND, labels_N = np.concatenate([_load(folder / name) for name in entry.shards]), _load(folder / entry.labels)
    if rows_ND.shape != (entry.rows, entry.dimensions) or len(labels_N) != entry.rows:
        raise changed_file(folder / MANIFEST_FILE)
    return rows_ND, labels_N


def query_and_gallery(embeddings: Path) -> tuple[str, str]:
    """Return the roles of queries and gallery; without a query role, the first role twice."""
    roles = list(read_manifest(embeddings))
    return ("query", "gallery") if "query" in roles else (roles[0], roles[0])


def save_kept_epoch(folder: Path, num_epochs: int) -> None:
    """Write the number of epochs after which the embedding weights were reached, if they are not the last epoch's.

    Raises:
        StoreError: the folder cannot be written.
    """
    try:
        write_whole(folder / KEPT_EPOCH_FILE, json.dumps({KEPT_EPOCH: num_epochs}) + "\n")
    except OSError as error:
        raise StoreError(f"{folder}: embeddings cannot be written ({error.strerror or error}); free or change the store") from None


def kept_epoch(folder: Path) -> dict[str, float]:
    """Return what `save_kept_epoch` wrote, as a score of the run; empty for embeddings of the last epoch.

    Raises:
        StoreError: the file is damaged.
    """
    path = folder / KEPT_EPOCH_FILE
    data = read_bytes(path)
    try:
        return {} if data is None else {KEPT_EPOCH: _KEPT_EPOCH.validate_json(data)[KEPT_EPOCH]}
    except (ValidationError, KeyError):
        raise changed_file(path) from None


def _load(path: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError):
        raise changed_file(path) from None
