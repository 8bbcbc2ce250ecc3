"""One global batch over several workers, with the gradients of one process.

Each worker embeds its shard of the global batch. A loss that compares samples receives the gathered global batch; a loss over centres
receives the shard, weighted so that the average over workers is the loss of the global batch. In both cases averaging the gradients over
the workers (as DistributedDataParallel does) gives exactly the gradient of one process. A loss with sharded classes also receives the
gathered batch; its centres already have their whole gradient and are not averaged.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.autograd.function import once_differentiable

from dml_core.errors import DmlError
from dml_core.float32 import at_least_float32
from dml_core.losses.class_shards import gather
from dml_core.losses.contract import Loss, LossOutput

T = TypeVar("T")


def world_size() -> int:
    """Return the number of workers in the process group; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this worker's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def wait_for_all() -> None:
    """Return when every worker has called this."""
    if world_size() > 1:
        dist.barrier()


def from_rank_zero(read: Callable[[], T]) -> T:
    """Return the result of `read` on rank 0 to every worker; if their disks differ, workers reading for themselves would disagree.

    Raises:
        Exception: an error of `read` on rank 0, on every worker.
    """
    answer: list[Any] = [None]
    with failing_together():
        if rank() == 0:
            answer = [read()]
    if world_size() > 1:
        dist.broadcast_object_list(answer, src=0)
    return answer[0]


def state_from_rank_zero(state: Any, device: torch.device, keep: Callable[[tuple[Any, ...], Tensor], Tensor]) -> Any:
    """Return rank 0's nested state, on the CPU, to every worker; tensors are sent one by one, so a worker holds its part plus one tensor.

    Args:
        state: dictionaries, lists, tensors and plain values; ignored on other workers.
        device: this worker's, through which tensors are sent.
        keep: maps a tensor's path of keys and the tensor to the part that this worker keeps.
    """
    if world_size() == 1:
        return state
    outline = from_rank_zero(lambda: _outline(state))

    def receive(part: Any, path: tuple[Any, ...], own: Any) -> Any:
        if isinstance(part, Tensor):
            return keep(path, _tensor_from_rank_zero(part, own, device))
        if isinstance(part, dict):
            return {key: receive(value, (*path, key), own and own[key]) for key, value in part.items()}
        if isinstance(part, list):
            return [receive(value, (*path, place), own and own[place]) for place, value in enumerate(part)]
        return part

    return receive(outline, (), state if rank() == 0 else None)


def _outline(state: Any) -> Any:
    """Return the state without the values of its tensors."""
    if isinstance(state, Tensor):
        return torch.empty_like(state, device="meta")
    if isinstance(state, dict):
        return {key: _outline(value) for key, value in state.items()}
    return [_outline(value) for value in state] if isinstance(state, list) else state


def _tensor_from_rank_zero(outline: Tensor, own: Tensor | None, device: torch.device) -> Tensor:
    """Return rank 0's tensor, sent as bytes, so that any data type works with any backend."""
    travelling = torch.empty(outline.shape, dtype=outline.dtype, device=device) if own is None else own.to(device).contiguous()
    if travelling.numel():
        dist.broadcast(travelling.reshape(-1).view(torch.uint8), src=0)
    if own is not None:
        return own
    # A copy even on the CPU: a contiguous tensor may have other strides than rank 0's, as a 1x1 convolution's weight in channels_last.
    return torch.empty_like(outline, device="cpu").copy_(travelling)


def _portable(error: Exception | None) -> Exception | None:
    """Return an error that can be sent to other workers: the project's own unchanged, others as text."""
    if error is None or isinstance(error, DmlError):
        return error
    return RuntimeError(f"worker {rank()}: {type(error).__name__}: {error}")


class Failures:
    """Errors of only this worker, kept until all workers synchronise; a single worker raises at once."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    @property
    def exist(self) -> bool:
        """True if this worker has an error."""
        return self._first is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run this worker's code without collectives; keep the first error that it raises."""
        try:
            yield
        except Exception as error:
            if world_size() == 1:
                raise
            self._first = self._first or error

    def raise_together(self) -> None:
        """Raise an error of one worker on every worker; every worker calls it.

        An error raised on only one worker would leave the others waiting in the next collective until its timeout.

        Raises:
            Exception: this worker's own error, else that of the lowest rank with one.
        """
        errors: list[Exception | None] = [None] * world_size()
        if world_size() > 1:
            dist.all_gather_object(errors, _portable(self._first))
        for error in (self._first, *errors):
            if error is not None:
                raise error


@contextmanager
def failing_together() -> Iterator[None]:
    """Run this worker's code without collectives, then raise an error of one worker on every worker; all make the same call."""
    failures = Failures()
    with failures.kept():
        yield
    failures.raise_together()


def shard_sizes(num_samples: int, num_workers: int) -> list[int]:
    """Return the sizes of the workers' contiguous shards of a global batch, those of `np.array_split`: the larger ones first."""
    quotient, remainder = divmod(num_samples, num_workers)
    return [quotient + (worker < remainder) for worker in range(num_workers)]


def equal_buffers(module: nn.Module) -> None:
    """Give every worker rank 0's buffers. Sums on a GPU have no fixed order, so buffers that every worker computes drift apart."""
    if world_size() > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def sum_over_workers(values: Tensor) -> Tensor:
    """Return the sum of the workers' tensors, in place; unchanged for one worker."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def gather_with_gradients(shard: Tensor, sizes: list[int], in_parts: bool = False) -> Tensor:
    """Concatenate all workers' shards in rank order, with gradients to this worker's own shard.

    Every worker then computes the same loss of the global batch, so the own shard's gradient needs no communication; it is multiplied by
    the number of workers because gradients are averaged over workers afterwards.

    Args:
        shard: (n_rank, ...), n_rank = sizes[rank].
        sizes: shard size of every worker; they may differ.
        in_parts: each worker's gradient comes only through its own classes, so the workers' gradients are summed.
    """
    if world_size() == 1:
        return shard
    return _Gather.apply(shard, sizes, in_parts)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, sizes: list[int], in_parts: bool) -> Tensor:
        ctx.sizes, ctx.in_parts = sizes, in_parts
        if len(set(sizes)) == 1:  # received without a further copy
            gathered = shard.new_empty(sum(sizes), *shard.shape[1:])
            dist.all_gather_into_tensor(gathered, shard.contiguous())
            return gathered
        return gather(shard, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.in_parts:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient)
        return torch.split(gradient, ctx.sizes)[rank()] * len(ctx.sizes), None, None


class TrainingSystem(nn.Module):
    """Model and loss as one module, which DistributedDataParallel wraps and a checkpoint contains."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, images: Tensor, labels_N: Tensor, sizes: list[int], generator: Generator | None = None) -> LossOutput:
        """Return this worker's loss of the global batch; the average of its gradient over workers is the global gradient.

        Args:
            images: this worker's shard, (n_rank, channels, height, width).
            labels_N: labels of the whole global batch, in rank order.
            sizes: shard size of every worker.
            generator: the same draws on every worker.
        """
        embeddings = self.model(images)
        # A compiled loss computes its gradients with the autocast of its caller, even where it computes its value without.
        with torch.autocast(images.device.type, enabled=False):
            return self.loss_of(embeddings, labels_N, sizes, generator)

    def loss_of(self, embeddings: Tensor, labels_N: Tensor, sizes: list[int], generator: Generator | None) -> LossOutput:
        """Return the loss as `forward` does, from the model's outputs for this worker's images, (n_rank, D)."""
        if self.loss.shard is not None:
            wide = at_least_float32(embeddings)  # the parts of their gradients are added up in float32 or wider
            return self.loss(gather_with_gradients(wide, sizes, in_parts=True), labels_N, generator)
        if self.loss.needs.global_batch:
            return self.loss(gather_with_gradients(embeddings, sizes), labels_N, generator)
        share = sizes[rank()] * len(sizes) / labels_N.shape[0]
        if share == 0:
            untouched = sum((p.sum() for p in self.loss.parameters()), embeddings.sum()) * 0.0
            return LossOutput(untouched, {})
        output: LossOutput = self.loss(embeddings, torch.split(labels_N, sizes)[rank()], generator)
        return LossOutput(output.total * share, {name: part * share for name, part in output.parts.items()})
