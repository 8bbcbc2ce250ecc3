"""The folder of a run's extracted embeddings, as `tasks.workers.embedding` writes and `tasks.scores` reads it: shards and a manifest."""

import json
from pathlib import Path

import numpy as np

MANIFEST_FILE = "manifest.json"


def load_embeddings(folder: Path, role: str) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings (N, D) float32 and labels (N,) int64 of a role, in dataset order."""
    entry = json.loads((folder / MANIFEST_FILE).read_text())[role]
    return np.concatenate([np.load(folder / name) for name in entry["shards"]]), np.load(folder / entry["labels"])


def query_and_gallery(embeddings: Path) -> tuple[str, str]:
    """The roles that ask and that are searched: query and gallery where there are such, else the only one twice."""
    roles = list(json.loads((embeddings / MANIFEST_FILE).read_text()))
    return ("query", "gallery") if "query" in roles else (roles[0], roles[0])
