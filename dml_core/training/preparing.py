"""Image loading on all workers, and preparation with the training set before the first epoch."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dml_core.data.store.packed import Indices, PackedDataset
from dml_core.data.views.batches import Loader, TestView, View
from dml_core.data.views.samplers import first_batch_size
from dml_core.float32 import full_float32
from dml_core.training.config import TrainingConfig
from dml_core.training.parallel.workers import Failures, TrainingSystem, failing_together, rank, sum_over_workers, world_size
from dml_core.training.pulse import beat
from dml_core.training.seeding import derived_seed, seeded

EMBEDDING_BATCH = 256
FAILED_SIDE = 224


def load(
    loader: Loader, shards: Sequence[Indices], view: View, failures: Failures, copies: Sequence[Indices] | None = None
) -> Iterator[Tensor]:
    """Yield this worker's images of each batch, (n, 3, H, W).

    Images that cannot be loaded are black and the error is kept: the step runs, so that all workers synchronise and then raise.
    """
    loaded = loader.batches(shards, view, copies)
    side = view.config.crop_size or FAILED_SIDE
    for shard in shards:
        images = None
        with failures.kept():
            images, _ = next(loaded)
        yield torch.zeros(len(shard), 3, side, side, device=loader.device) if images is None else images


def prepare(system: TrainingSystem, dataset: PackedDataset, config: TrainingConfig, seed: int, loader: Loader) -> None:
    """Prepare a system with the training images, if configured: update BatchNorm's averages, initialise the loss's centres.

    Raises:
        Exception: an error of one worker in loading images, on every worker.
    """
    if config.warm_up_batchnorm:
        _warm_up_batchnorm(system, dataset, config, seed, loader)
    if system.loss.needs.initial_embeddings:
        outputs_ND = training_outputs(system, dataset, config, loader)
        system.loss.initialise(outputs_ND, torch.from_numpy(dataset.labels).to(loader.device))


@torch.no_grad()
def _warm_up_batchnorm(system: TrainingSystem, dataset: PackedDataset, config: TrainingConfig, seed: int, loader: Loader) -> None:
    """Make one pass over the training images in training mode, plain view, in dataset order; updates only BatchNorm's averages."""
    system.train()
    size = first_batch_size(config.sampler, len(dataset), len(dataset.class_names))
    batches = np.split(np.arange(len(dataset)), range(size, len(dataset) - size + 1, size))  # the remainder joins the last batch
    shards, failures = [np.array_split(batch, world_size())[rank()] for batch in batches], Failures()
    for step, images in enumerate(load(loader, shards, TestView(config.transform), failures)):
        with seeded(derived_seed(seed, f"BatchNorm's averages on worker {rank()}", step=step), loader.device):
            system.model(images)
        beat()
    failures.raise_together()


@torch.no_grad()
@full_float32()
def training_outputs(system: TrainingSystem, dataset: PackedDataset, config: TrainingConfig, loader: Loader) -> Tensor:
    """Return the loss's inputs for every training image, plain view, in dataset order, (N, D), on every worker; all must call it.

    Workers take batches in turn, so that each batch is computed as by a single worker.

    Raises:
        Exception: an error of one worker in loading images, on every worker.
    """
    system.eval()
    batches = np.split(np.arange(len(dataset)), range(EMBEDDING_BATCH, len(dataset), EMBEDDING_BATCH))
    outputs_ND = next(system.parameters()).new_zeros(len(dataset), system.loss.embedding_dim)
    with failing_together():
        for images, rows in loader.batches(batches[rank() :: world_size()], TestView(config.transform)):
            outputs_ND[rows[0] : rows[-1] + 1] = system.model(images)
            beat()
    return sum_over_workers(outputs_ND)
