"""One global batch over several workers, with the gradients of one process.

Each worker embeds its shard of the global batch. A loss that compares samples sees the gathered global batch; a loss over centres
sees the shard, weighted so that the average over workers is the loss of the global batch. In both cases averaging the gradients over
the workers (which is what DistributedDataParallel does) gives exactly the gradient that one process would have computed. A loss whose
classes are spread over the workers sees the gathered batch too; its centres have their whole gradient already and are not averaged.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.autograd.function import once_differentiable

from dml_core.errors import DmlError
from dml_core.losses.contract import Loss, LossOutput

T = TypeVar("T")


def world_size() -> int:
    """Number of workers in the process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This worker's rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_rank_zero(read: Callable[[], T]) -> T:
    """What `read` gives on rank 0, on every worker; workers whose disks differ would not agree on what each of them reads.

    Raises:
        DmlError: the one that `read` raised on rank 0, on every worker.
    """
    answer: list[Any] = [None, None]
    if rank() == 0:
        try:
            answer = [read(), None]
        except DmlError as error:
            answer = [None, error]
    if world_size() > 1:
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    found: T = answer[0]
    return found


def shard_sizes(num_samples: int, num_workers: int) -> list[int]:
    """Sizes of the workers' contiguous shards of a global batch: as equal as can be, the larger ones first."""
    quotient, remainder = divmod(num_samples, num_workers)
    return [quotient + (worker < remainder) for worker in range(num_workers)]


def gather_with_gradients(shard: Tensor, sizes: list[int], in_parts: bool = False) -> Tensor:
    """All workers' shards, concatenated in rank order, with gradients to this worker's own shard.

    Every worker then computes the same loss of the global batch, so the gradient of the own shard is known without communication;
    it is multiplied by the number of workers because gradients are averaged over workers afterwards.

    Args:
        shard: (n_rank, ...), n_rank = sizes[rank].
        sizes: shard size of every worker; they may differ.
        in_parts: a worker's own gradient is that through the classes that it holds, and the workers' have to be added up.
    """
    if world_size() == 1:
        return shard
    gathered: Tensor = _Gather.apply(shard, sizes, in_parts)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, sizes: list[int], in_parts: bool) -> Tensor:
        ctx.sizes, ctx.in_parts = sizes, in_parts
        if len(set(sizes)) == 1:  # received where it stays
            gathered = shard.new_empty(sum(sizes), *shard.shape[1:])
            dist.all_gather_into_tensor(gathered, shard.contiguous())
            return gathered
        padded = shard.new_zeros(max(sizes), *shard.shape[1:])
        padded[: shard.shape[0]] = shard
        received = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(received, padded)
        return torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.in_parts:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient)
        return torch.split(gradient, ctx.sizes)[rank()] * len(ctx.sizes), None, None


class TrainingSystem(nn.Module):
    """Model and loss as one module: what DistributedDataParallel wraps and what a checkpoint holds."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, images: Tensor, labels_N: Tensor, sizes: list[int], generator: Generator | None = None) -> LossOutput:
        """Loss of the global batch as seen by this worker; the average over workers of its gradient is the global gradient.

        Args:
            images: this worker's shard, (n_rank, channels, height, width).
            labels_N: labels of the whole global batch, in rank order.
            sizes: shard size of every worker.
            generator: the same draws on every worker.
        """
        return self.loss_of(self.model(images), labels_N, sizes, generator)

    def loss_of(self, embeddings: Tensor, labels_N: Tensor, sizes: list[int], generator: Generator | None) -> LossOutput:
        """As `forward`, from what the model makes of the images: this worker's (n_rank, D)."""
        if self.loss.shard is not None:
            half = embeddings.dtype in (torch.float16, torch.bfloat16)
            wide = embeddings.float() if half else embeddings  # the parts of their gradients are added up in float32 or better
            in_parts: LossOutput = self.loss(gather_with_gradients(wide, sizes, in_parts=True), labels_N, generator)
            return in_parts
        if self.loss.needs.global_batch:
            gathered: LossOutput = self.loss(gather_with_gradients(embeddings, sizes), labels_N, generator)
            return gathered
        share = sizes[rank()] * len(sizes) / labels_N.shape[0]
        if share == 0:
            untouched = sum((p.sum() for p in self.loss.parameters()), embeddings.sum()) * 0.0
            return LossOutput(untouched, {})
        output: LossOutput = self.loss(embeddings, torch.split(labels_N, sizes)[rank()], generator)
        return LossOutput(output.total * share, {name: part * share for name, part in output.parts.items()})
