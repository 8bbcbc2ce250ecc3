"""A comparing loss over more images than fit into memory (Gao et al., "Scaling Deep Contrastive Learning Batch Size", RepL4NLP 2021).

A worker's shard is embedded in chunks without a graph, the loss is computed once on all embeddings, and each chunk is then embedded again
with the same random state, to be handed its part of the loss's gradient. Activations of one chunk exist at a time; the gradients are those
of the whole batch, for one more forward pass. What is asked of the network is that an image's embedding depends on no other image.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from dml_core.errors import ConfigError
from dml_core.losses.contract import LossOutput
from dml_core.training.parallel import TrainingSystem

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


class ChunkedSystem(nn.Module):
    """What DistributedDataParallel wraps instead of the system: one chunk's second pass."""

    def __init__(self, system: TrainingSystem) -> None:
        super().__init__()
        self.system = system

    def forward(self, images: Tensor, gradient_ND: Tensor) -> Tensor:
        """A scalar whose gradient to the network is the chunk's share of the loss's; its value means nothing.

        The loss's own parameters have their gradients already. They add 0 here, so that they are reduced with the network's.
        """
        loss = self.system.loss
        reduced = (p.sum() for name, p in loss.named_parameters() if name not in loss.sharded_dims)
        untouched = sum(reduced, gradient_ND.new_zeros(())) * 0.0
        total: Tensor = (self.system.model(images) * gradient_ND).sum() + untouched
        return total


def backward_in_chunks(
    parallel: nn.Module,
    images: Tensor,
    labels_N: Tensor,
    sizes: list[int],
    generator: Generator,
    embed_at_once: int,
    autocast: Autocast,
) -> LossOutput:
    """Leave in the parameters the gradients that `TrainingSystem.forward` and `backward` would have left, and return what it returns.

    Workers may have different numbers of chunks: they meet in the loss and in the last chunk alone.

    Args:
        parallel: a `ChunkedSystem`, in DistributedDataParallel where there are several workers.
        images: this worker's shard; `labels_N`, `sizes` and `generator` as `TrainingSystem.forward` takes them.
        embed_at_once: images of a chunk.
        autocast: the precision of the network. Entered anew for each pass: it keeps the weights that it has cast, and those of the pass
            without a graph would have no gradient.
    """
    wrapper = parallel if isinstance(parallel, DistributedDataParallel) else None
    chunked = parallel if wrapper is None else wrapper.module
    assert isinstance(chunked, ChunkedSystem)
    system = chunked.system
    chunks = torch.split(images, embed_at_once)
    states, parts = [], []
    with torch.no_grad(), autocast():
        for chunk in chunks:
            states.append(_random_state(images.device))
            parts.append(system.model(chunk))
    embeddings_ND = torch.cat(parts).requires_grad_()
    with autocast():
        output = system.loss_of(embeddings_ND, labels_N, sizes, generator)
    torch.autograd.backward(output.total)
    assert embeddings_ND.grad is not None
    gradients = torch.split(embeddings_ND.grad, embed_at_once)
    for number, (chunk, gradient_ND, state) in enumerate(zip(chunks, gradients, states, strict=True), start=1):
        reduced = contextlib.nullcontext() if wrapper is None or number == len(chunks) else wrapper.no_sync()
        with reduced, torch.random.fork_rng(_cuda(images.device)):
            _set_random_state(state, images.device)
            with autocast():
                share = parallel(chunk, gradient_ND)
            torch.autograd.backward(share)
    return output


def check_independent(model: nn.Module) -> None:
    """Refuse a network in whose training a BatchNorm would see chunks where it should see the batch; it is left in training mode.

    It is refused rather than left to the user: normalised by small chunks, the network would be another one, and told by nothing.

    Raises:
        ConfigError: naming the first such layer.
    """
    for name, module in model.train().named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ConfigError(
                f"embed_at_once: the BatchNorm '{name}' would see chunks and not the batch: remove embed_at_once, or take a network and a "
                "head without BatchNorm (model.freeze_batchnorm: statistics freezes the backbone's)"
            )


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
