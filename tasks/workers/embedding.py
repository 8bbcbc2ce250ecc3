"""Extract embeddings with the workers of a run: sharded float32 in dataset order, with one manifest, for any number of workers.

The rows of a role are split into shards whose size depends only on the number of rows; worker r computes shards r, r + W, ... Within a
shard images pass through the network in fixed batches, so every number of workers writes the same bytes.
"""

from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from dml_core.data.store.packed import PackedDataset
from dml_core.data.views.batches import Loader, TestView
from dml_core.data.views.device_decoding import check_decoder
from dml_core.data.views.transform_config import TransformConfig
from dml_core.files import write_errors
from dml_core.float32 import full_float32
from dml_core.models.embedder import Embedder
from dml_core.training.parallel.workers import rank, wait_for_all, world_size
from dml_core.training.pulse import beat
from tasks.runs.embeddings import RoleEntry, save_array, save_manifest, shard_ranges

BATCH_SIZE = 128
NUM_SHARDS = 16
MAX_SHARD_ROWS = 65_536


@torch.no_grad()
@full_float32()
def extract(
    model: Embedder,
    transform: TransformConfig,
    roles: dict[str, PackedDataset],
    folder: Path,
    device: torch.device,
    num_loader_workers: int = 0,
) -> None:
    """Write every role's embeddings and labels below `folder`, computed in full float32; every worker of the process group makes this call.

    Rank 0 writes the manifest last.

    Raises:
        ConfigError: the transform's decoder needs a GPU, and the device is none.
        StoreError: the folder cannot be written.
    """
    check_decoder(transform, device)
    model.eval()
    entries: dict[str, RoleEntry] = {}
    with write_errors(f"{folder}: embeddings", "free or change the store"):
        folder.mkdir(parents=True, exist_ok=True)
        for role, dataset in roles.items():
            rows_of = shard_ranges(role, len(dataset), shard_rows(len(dataset)))
            with closing(Loader(dataset, num_loader_workers, device)) as loader:
                for name, rows in [*rows_of.items()][rank() :: world_size()]:
                    batches = np.split(np.arange(rows.start, rows.stop), range(BATCH_SIZE, len(rows), BATCH_SIZE))
                    outputs = []
                    for images, _ in loader.batches(batches, TestView(transform)):
                        outputs.append(model.embed(images).float().cpu().numpy())
                        beat()
                    save_array(folder / name, np.concatenate(outputs))
            labels = f"{role}-labels.npy"
            if rank() == 0:
                save_array(folder / labels, dataset.labels)
            entries[role] = RoleEntry(rows=len(dataset), dimensions=int(model.head.embedding_dim), shards=tuple(rows_of), labels=labels)
        wait_for_all()
        if rank() == 0:
            save_manifest(folder, entries)


def shard_rows(num_rows: int) -> int:
    """Return the rows of one shard: at most a sixteenth of all, in whole batches, at least one batch."""
    batches = max(1, num_rows // (NUM_SHARDS * BATCH_SIZE))
    return min(batches * BATCH_SIZE, MAX_SHARD_ROWS)
