"""Losses that compare samples, over batches larger than memory (Gao et al., "Scaling Deep Contrastive Learning Batch Size", RepL4NLP 2021).

Each worker embeds its shard in chunks without a graph, computes the loss once on all embeddings, and embeds each chunk again with the same
random state to backpropagate its part of the loss's gradient. Only one chunk's activations exist at a time; the gradients are those of the
whole batch, for one more forward pass. An image's embedding must not depend on other images.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dml_core.errors import ConfigError
from dml_core.losses.contract import LossOutput
from dml_core.training.parallel.batchnorm import first_batch_statistics
from dml_core.training.parallel.workers import TrainingSystem

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


class ChunkedSystem(nn.Module):
    """Module wrapped by DistributedDataParallel instead of the system: the second pass of one chunk."""

    def __init__(self, system: TrainingSystem) -> None:
        super().__init__()
        self.system = system

    def forward(self, images: Tensor, gradient_ND: Tensor) -> Tensor:
        """Return a scalar whose gradient to the network is the chunk's share of the loss's; its value is meaningless.

        The loss's own parameters have their gradients already. They are added here times 0, so that they are reduced with the network's.
        """
        loss = self.system.loss
        reduced = (p.sum() for name, p in loss.named_parameters() if name not in loss.sharded_dims)
        untouched = sum(reduced, gradient_ND.new_zeros(())) * 0.0
        return (self.system.model(images) * gradient_ND).sum() + untouched


def backward_in_chunks(
    parallel: nn.Module, images: Tensor, labels_N: Tensor, sizes: list[int], generator: Generator, embed_at_once: int, autocast: Autocast
) -> LossOutput:
    """Leave the same gradients as `TrainingSystem.forward` and `backward`, and return the same output.

    Workers may have different numbers of chunks: they synchronise only in the loss and in the last chunk.

    Args:
        parallel: a `ChunkedSystem`, in DistributedDataParallel if there are several workers.
        images: this worker's shard; `labels_N`, `sizes` and `generator` as in `TrainingSystem.forward`.
        embed_at_once: images per chunk.
        autocast: precision of the network, entered for each pass.
    """
    wrapper = parallel if isinstance(parallel, DistributedDataParallel) else None
    chunked = parallel if wrapper is None else wrapper.module
    assert isinstance(chunked, ChunkedSystem)
    system = chunked.system
    cuda = [images.device] if images.device.type == "cuda" else []
    chunks = torch.split(images, embed_at_once)
    with torch.random.fork_rng(cuda):  # the second pass then draws as the first
        with torch.no_grad(), autocast():
            parts = [system.model(chunk) for chunk in chunks]
        embeddings_ND = torch.cat(parts).requires_grad_()
        output = system.loss_of(embeddings_ND, labels_N, sizes, generator)
    torch.autograd.backward(output.total)
    assert embeddings_ND.grad is not None
    gradients = torch.split(embeddings_ND.grad, embed_at_once)
    for number, (chunk, gradient_ND) in enumerate(zip(chunks, gradients, strict=True), start=1):
        with contextlib.nullcontext() if wrapper is None or number == len(chunks) else wrapper.no_sync():
            with autocast():
                share = parallel(chunk, gradient_ND)
            torch.autograd.backward(share)
    return output


def check_independent(model: nn.Module) -> None:
    """Reject a network with a BatchNorm that normalises by the batch in training: over small chunks it would silently change the network.

    Raises:
        ConfigError: there is such a layer; the message names the first.
    """
    if (name := first_batch_statistics(model)) is not None:
        raise ConfigError(
            f"embed_at_once: the BatchNorm '{name}' would see chunks and not the batch: remove embed_at_once, or take a network and a head "
            "without BatchNorm (model.freeze_batchnorm: statistics freezes the backbone's)"
        )
