"""The folder of a run's extracted embeddings, as `tasks.workers.embedding` writes and `tasks.scores` reads it: shards and a manifest."""

import json
from pathlib import Path

import numpy as np

from dml_core.errors import StoreError

MANIFEST_FILE = "manifest.json"
KEPT_EPOCH_FILE = "kept_epoch.json"
KEPT_EPOCH = "kept_epoch"  # the score that says which: after how many epochs, of all that were trained


def load_embeddings(folder: Path, role: str) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings (N, D) float32 and labels (N,) int64 of a role, in dataset order."""
    entry = json.loads((folder / MANIFEST_FILE).read_text())[role]
    return np.concatenate([np.load(folder / name) for name in entry["shards"]]), np.load(folder / entry["labels"])


def query_and_gallery(embeddings: Path) -> tuple[str, str]:
    """The roles that ask and that are searched: query and gallery where there are such, else the only one twice."""
    roles = list(json.loads((embeddings / MANIFEST_FILE).read_text()))
    return ("query", "gallery") if "query" in roles else (roles[0], roles[0])


def save_kept_epoch(folder: Path, num_epochs: int) -> None:
    """Write after how many epochs the weights were reached that embed; beside embeddings that are not the last epoch's.

    Raises:
        StoreError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / KEPT_EPOCH_FILE).write_text(json.dumps({KEPT_EPOCH: num_epochs}) + "\n")
    except OSError as error:
        raise StoreError(f"{folder}: embeddings cannot be written ({error.strerror or error}); free or change the store") from None


def kept_epoch(folder: Path) -> dict[str, float]:
    """What `save_kept_epoch` wrote, as a score of the run; nothing beside embeddings of the last epoch."""
    path = folder / KEPT_EPOCH_FILE
    return {KEPT_EPOCH: float(json.loads(path.read_text())[KEPT_EPOCH])} if path.is_file() else {}
