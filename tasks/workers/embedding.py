"""Extract embeddings with the workers of a run: sharded float32 in dataset order, with one manifest, for any number of workers.

The rows of a role are split into shards whose size depends only on the number of rows; worker r computes shards r, r + W, ... Within a
shard images pass through the network in fixed batches, so every number of workers writes the same bytes.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dml_core.data.store.packed import PackedDataset
from dml_core.data.views.batches import Loader, TestView
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import StoreError
from dml_core.float32 import without_tf32
from dml_core.models.embedder import Embedder
from dml_core.training.parallel.workers import rank, world_size
from dml_core.training.pulse import beat
from tasks.runs.embeddings import MANIFEST_FILE

BATCH_SIZE = 128
NUM_SHARDS = 16
MAX_SHARD_ROWS = 65_536


@torch.no_grad()
@without_tf32()
def extract(
    model: Embedder,
    transform: TransformConfig,
    roles: dict[str, PackedDataset],
    folder: Path,
    device: torch.device,
    num_loader_workers: int = 0,
) -> dict[str, Any]:
    """Write every role's embeddings and labels below `folder`, computed in full float32; every worker of the process group makes this call.

    Returns:
        The manifest: per role the number of rows and dimensions and the shards' file names; rank 0 writes it last, as `manifest.json`.

    Raises:
        StoreError: the folder cannot be written.
    """
    model.eval()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {
            role: _extract_role(model, transform, role, dataset, folder, device, num_loader_workers) for role, dataset in roles.items()
        }
        if world_size() > 1:
            dist.barrier()
        if rank() == 0:
            _write(folder / MANIFEST_FILE, lambda path: path.write_text(json.dumps(manifest, indent=1)))
    except OSError as error:
        raise StoreError(f"{folder}: embeddings cannot be written ({error.strerror or error}); free or change the store") from None
    return manifest


def shard_rows(num_rows: int) -> int:
    """Return the rows of one shard: at most a sixteenth of all, in whole batches, at least one batch."""
    batches = max(1, num_rows // (NUM_SHARDS * BATCH_SIZE))
    return min(batches * BATCH_SIZE, MAX_SHARD_ROWS)


def _extract_role(
    model: Embedder,
    transform: TransformConfig,
    role: str,
    dataset: PackedDataset,
    folder: Path,
    device: torch.device,
    num_loader_workers: int,
) -> dict[str, Any]:
    starts = list(range(0, len(dataset), shard_rows(len(dataset))))
    names = [f"{role}-{shard:05d}-of-{len(starts):05d}.npy" for shard in range(len(starts))]
    loader = Loader(dataset, num_loader_workers, device)
    for start, name in list(zip(starts, names, strict=True))[rank() :: world_size()]:
        rows = np.arange(start, min(start + shard_rows(len(dataset)), len(dataset)))
        batches = np.split(rows, range(BATCH_SIZE, len(rows), BATCH_SIZE))
        outputs = []
        for images, _ in loader.batches(batches, TestView(transform)):
            outputs.append(model.embed(images).float().cpu().numpy())
            beat()
        _write(folder / name, lambda path, outputs=outputs: _save_array(path, np.concatenate(outputs)))
    if rank() == 0:
        _write(folder / f"{role}-labels.npy", lambda path: _save_array(path, dataset.labels))
    return {"rows": len(dataset), "dimensions": int(model.head.embedding_dim), "shards": names, "labels": f"{role}-labels.npy"}


def _save_array(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)


def _write(path: Path, write: Any) -> None:
    """Write a temporary file, then rename it: every visible file in the folder is complete."""
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    write(beside)
    beside.replace(path)
