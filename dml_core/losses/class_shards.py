"""Softmax over classes sharded over workers, each of which holds the centres of a contiguous range.

Every worker sees the global batch's embeddings and computes the same loss. A sum over workers passes its gradient to each worker's own
summand without communication. A worker's centres thus get the full gradient of the loss, its embeddings only the part through these
centres; `training.parallel` adds up the parts. Without a shard (None) each function equals torch's.

Shapes: N samples, C classes of all workers or, with a shard, of this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


@dataclass(frozen=True)
class ClassShard:
    """The range of classes that one worker holds.

    Attributes:
        sizes: number of classes of each worker, in rank order.
        rank: this worker's rank.
    """

    sizes: tuple[int, ...]
    rank: int

    @property
    def first(self) -> int:
        """Index of the first class that this worker holds."""
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        """Number of classes that this worker holds."""
        return self.sizes[self.rank]

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """Return a copy of this worker's part of `whole`, whose dimension `dim` indexes the classes."""
        return whole.narrow(dim, self.first, self.size).clone()

    @torch.no_grad()
    def join(self, part: Tensor, dim: int) -> Tensor:
        """Gather the workers' parts into the whole tensor, on every worker; all workers must call it."""
        return gather(part.transpose(0, dim), self.sizes).transpose(0, dim).contiguous()


def gather(part: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the workers' parts, whose sizes may differ, concatenated along their first dimension; all workers must call it."""
    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: part.shape[0]] = part
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return torch.cat([rows[:size] for rows, size in zip(received, sizes, strict=True)])


def cross_entropy(logits_NC: Tensor, labels_N: Tensor, shard: ClassShard | None, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of the batch, as torch does; scalar."""
    if shard is None:
        return functional.cross_entropy(logits_NC, labels_N, label_smoothing=label_smoothing)
    return _CrossEntropy.apply(logits_NC, labels_N, shard, label_smoothing).mean()


def logsumexp(logits_NC: Tensor, shard: ClassShard | None) -> Tensor:
    """Return the log-sum-exp over all classes, (N,)."""
    if shard is None:
        return logits_NC.logsumexp(dim=1)
    return _LogSumExp.apply(logits_NC)


def own_logits(logits_NC: Tensor, labels_N: Tensor, shard: ClassShard | None) -> Tensor:
    """Return each sample's logit of its class, (N,); exactly one worker holds that class."""
    column_N1, is_here_N1 = own_columns(labels_N, shard)
    found_N = logits_NC.gather(1, column_N1).squeeze(1)
    return found_N if shard is None else _SumOverWorkers.apply(found_N.where(is_here_N1.squeeze(1), 0.0))


def without_own(logits_NC: Tensor, labels_N: Tensor, shard: ClassShard | None) -> Tensor:
    """Return the logits, (N, C), with each sample's own class excluded from a log-sum-exp over all classes."""
    column_N1, is_here_N1 = own_columns(labels_N, shard)
    if shard is None:
        return logits_NC.scatter(1, column_N1, -torch.inf)
    return logits_NC.scatter(1, column_N1, logits_NC.gather(1, column_N1).masked_fill(is_here_N1, -torch.inf))


def own_columns(labels_N: Tensor, shard: ClassShard | None) -> tuple[Tensor, Tensor]:
    """Return the column of each sample's class in this worker's part (arbitrary if elsewhere), and a mask of those in it; both (N, 1)."""
    if shard is None:
        return labels_N[:, None], torch.ones_like(labels_N, dtype=torch.bool)[:, None]
    column_N1 = labels_N[:, None] - shard.first
    return column_N1.clamp(0, shard.size - 1), (column_N1 >= 0) & (column_N1 < shard.size)


def mean_over_classes(mean: Tensor, shard: ClassShard | None) -> Tensor:
    """Return the mean over all classes, given the mean over this worker's classes; scalar."""
    return mean if shard is None else _SumOverWorkers.apply(mean * (shard.size / sum(shard.sizes)))


class _CrossEntropy(torch.autograd.Function):
    """Log-sum-exp minus the smoothed target, (N,). Its gradient, softmax minus target, is one tensor of the logits' size; with torch's sum
    and gather it would be four.
    """

    @staticmethod
    def forward(ctx: Any, logits_NC: Tensor, labels_N: Tensor, shard: ClassShard, label_smoothing: float) -> Tensor:
        largest_N = _largest(logits_NC)
        column_N1, is_here_N1 = own_columns(labels_N, shard)
        ctx.own_weight, ctx.weight = 1.0 - label_smoothing, label_smoothing / sum(shard.sizes)
        lower_NC = logits_NC - largest_N[:, None]
        target_N = ctx.own_weight * lower_NC.gather(1, column_N1).where(is_here_N1, 0.0).squeeze(1)
        if ctx.weight:
            target_N += ctx.weight * lower_NC.sum(dim=1)
        sums_2N = torch.stack([target_N, lower_NC.exp_().sum(dim=1)])
        dist.all_reduce(sums_2N)
        log_sum_N = sums_2N[1].log()
        ctx.save_for_backward(logits_NC, largest_N, log_sum_N, column_N1, is_here_N1)
        return log_sum_N - sums_2N[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NC, largest_N, log_sum_N, column_N1, is_here_N1 = ctx.saved_tensors
        gradient_NC = _softmax(logits_NC, largest_N, log_sum_N)
        gradient_NC.scatter_add_(1, column_N1, -ctx.own_weight * is_here_N1.to(gradient_NC))
        if ctx.weight:
            gradient_NC -= ctx.weight
        return gradient_NC.mul_(gradient_N[:, None]), None, None, None


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp over all classes, (N,); its gradient is the softmax over all classes."""

    @staticmethod
    def forward(ctx: Any, logits_NC: Tensor) -> Tensor:
        largest_N = _largest(logits_NC)
        sum_N = (logits_NC - largest_N[:, None]).exp_().sum(dim=1)
        dist.all_reduce(sum_N)
        log_sum_N = sum_N.log()
        ctx.save_for_backward(logits_NC, largest_N, log_sum_N)
        return largest_N + log_sum_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> Tensor:
        return _softmax(*ctx.saved_tensors).mul_(gradient_N[:, None])


def _largest(logits_NC: Tensor) -> Tensor:
    """Return each sample's largest logit over all workers, (N,)."""
    largest_N = logits_NC.amax(dim=1)
    dist.all_reduce(largest_N, dist.ReduceOp.MAX)
    return largest_N


def _softmax(logits_NC: Tensor, largest_N: Tensor, log_sum_N: Tensor) -> Tensor:
    """Return the softmax, (N, C), as a new tensor. Subtracting the maximum first is exact for close numbers; a log-sum-exp is rounded."""
    return (logits_NC - largest_N[:, None]).sub_(log_sum_N[:, None]).exp_()


class _SumOverWorkers(torch.autograd.Function):
    """Sum over workers. All workers use it identically, so each summand's gradient is the sum's, without communication."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
