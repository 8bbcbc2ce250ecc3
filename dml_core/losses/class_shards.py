"""Classes spread over workers: each holds the centres of a contiguous part, and a softmax over all of them is put together from the parts.

Every worker sees the embeddings of the global batch and comes to the same loss. A sum over workers passes its gradient to each worker's
own summand without communication, so that a worker's centres have the whole gradient of the loss, and the embeddings that part of theirs
that goes through these centres; the parts are added up by `training.parallel`. Without a shard (None) each function is torch's.

Shapes: N samples, C classes of all workers or, with a shard, of this one.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


@dataclass(frozen=True)
class ClassShard:
    """Which of the classes one worker holds.

    Attributes:
        sizes: number of classes of each worker, in order of their ranks.
        rank: the worker's.
    """

    sizes: tuple[int, ...]
    rank: int

    @property
    def first(self) -> int:
        """The first class that this worker holds."""
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        """How many classes this worker holds."""
        return self.sizes[self.rank]

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This worker's part of a tensor whose dimension `dim` is the classes; a copy."""
        return whole.narrow(dim, self.first, self.size).clone()

    @torch.no_grad()
    def join(self, part: Tensor, dim: int) -> Tensor:
        """The whole of which every worker has a part, on every worker; all of them call it."""
        rows = part.transpose(0, dim)
        padded = rows.new_zeros(max(self.sizes), *rows.shape[1:])
        padded[: self.size] = rows
        received = [torch.empty_like(padded) for _ in self.sizes]
        dist.all_gather(received, padded)
        whole = torch.cat([rows[:size] for rows, size in zip(received, self.sizes, strict=True)])
        return whole.transpose(0, dim).contiguous()


def cross_entropy(logits_NC: Tensor, labels_N: Tensor, shard: ClassShard | None, label_smoothing: float = 0.0) -> Tensor:
    """Mean over the batch, as torch's; scalar."""
    if shard is None:
        return functional.cross_entropy(logits_NC, labels_N, label_smoothing=label_smoothing)
    cost_N: Tensor = _CrossEntropy.apply(logits_NC, labels_N, shard, label_smoothing)
    return cost_N.mean()


def logsumexp(logits_NC: Tensor, shard: ClassShard | None) -> Tensor:
    """(N,), over all classes."""
    if shard is None:
        return logits_NC.logsumexp(dim=1)
    total_N: Tensor = _LogSumExp.apply(logits_NC)
    return total_N


def own_logits(logits_NC: Tensor, labels_N: Tensor, shard: ClassShard | None) -> Tensor:
    """(N,): each sample's logit of its own class, which one worker has."""
    column_N1, is_here_N1 = own_columns(labels_N, shard)
    found_N = logits_NC.gather(1, column_N1).squeeze(1)
    return found_N if shard is None else _sum_over_workers(found_N.where(is_here_N1.squeeze(1), 0.0))


def without_own(logits_NC: Tensor, labels_N: Tensor, shard: ClassShard | None) -> Tensor:
    """(N, C): the logits, with each sample's own class lost in a log-sum-exp over all classes."""
    column_N1, is_here_N1 = own_columns(labels_N, shard)
    if shard is None:
        return logits_NC.scatter(1, column_N1, -torch.inf)
    return logits_NC.scatter(1, column_N1, logits_NC.gather(1, column_N1).masked_fill(is_here_N1, -torch.inf))


def own_columns(labels_N: Tensor, shard: ClassShard | None) -> tuple[Tensor, Tensor]:
    """(N, 1): the column of each sample's class among this worker's, and whether it is there; where it is not, some column."""
    if shard is None:
        return labels_N[:, None], torch.ones_like(labels_N, dtype=torch.bool)[:, None]
    column_N1 = labels_N[:, None] - shard.first
    return column_N1.clamp(0, shard.size - 1), (column_N1 >= 0) & (column_N1 < shard.size)


def mean_over_classes(mean: Tensor, shard: ClassShard | None) -> Tensor:
    """The mean over all classes, from that over this worker's; scalar."""
    return mean if shard is None else _sum_over_workers(mean * (shard.size / sum(shard.sizes)))


class _CrossEntropy(torch.autograd.Function):
    """(N,): log-sum-exp less the smoothed target. Its gradient, softmax less target, is one tensor of the logits' size; of a sum and a
    gather of torch's it would be four.
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
    """(N,), with the softmax over all classes as its gradient."""

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
    """(N,): of all workers' logits."""
    largest_N = logits_NC.amax(dim=1)
    dist.all_reduce(largest_N, dist.ReduceOp.MAX)
    return largest_N


def _softmax(logits_NC: Tensor, largest_N: Tensor, log_sum_N: Tensor) -> Tensor:
    """(N, C), a new tensor. The largest goes first: near numbers differ exactly, where a log-sum-exp's own rounding would stay."""
    return (logits_NC - largest_N[:, None]).sub_(log_sum_N[:, None]).exp_()


def _sum_over_workers(values: Tensor) -> Tensor:
    total: Tensor = _SumOverWorkers.apply(values)
    return total


class _SumOverWorkers(torch.autograd.Function):
    """A sum that every worker goes on with alike: the gradient of each summand is that of the sum, and known without communication."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
