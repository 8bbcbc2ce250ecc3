"""Classes spread over workers: each holds the centres of a contiguous part, and a softmax over all of them is put together from the parts.

Every worker sees the embeddings of the global batch and comes to the same loss. The sums over workers pass a gradient on as it is, so
that a worker's centres have the whole gradient of the loss, and the embeddings that part of theirs that goes through these centres; the
parts are added up by `training.parallel`. Without a shard (None) each function is the plain one of torch.

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
    normaliser_N = logsumexp(logits_NC, shard)
    target_N = own_logits(logits_NC, labels_N, shard)
    if label_smoothing:
        mean_N = _sum_over_workers(logits_NC.sum(dim=1)) / sum(shard.sizes)
        target_N = (1.0 - label_smoothing) * target_N + label_smoothing * mean_N
    return (normaliser_N - target_N).mean()


def logsumexp(logits_NC: Tensor, shard: ClassShard | None) -> Tensor:
    """(N,), over all classes: of each worker's own, taken off the largest of them."""
    own_N = logits_NC.logsumexp(dim=1)
    if shard is None:
        return own_N
    largest_N = own_N.detach().clone()
    dist.all_reduce(largest_N, dist.ReduceOp.MAX)
    return largest_N + _sum_over_workers((own_N - largest_N).exp()).log()


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
    lowest = torch.finfo(logits_NC.dtype).min  # not -inf: a worker may hold no other class, and its own log-sum-exp has a gradient
    return logits_NC.scatter(1, column_N1, logits_NC.gather(1, column_N1).masked_fill(is_here_N1, lowest))


def own_columns(labels_N: Tensor, shard: ClassShard | None) -> tuple[Tensor, Tensor]:
    """(N, 1): the column of each sample's class among this worker's, and whether it is there; where it is not, some column."""
    if shard is None:
        return labels_N[:, None], torch.ones_like(labels_N, dtype=torch.bool)[:, None]
    column_N1 = labels_N[:, None] - shard.first
    return column_N1.clamp(0, shard.size - 1), (column_N1 >= 0) & (column_N1 < shard.size)


def mean_over_classes(mean: Tensor, shard: ClassShard | None) -> Tensor:
    """The mean over all classes, from that over this worker's; scalar."""
    return mean if shard is None else _sum_over_workers(mean * (shard.size / sum(shard.sizes)))


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
