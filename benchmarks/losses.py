"""Benchmark each loss, forward and backward, against pytorch-metric-learning's (PML) in the same run.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/losses.py [LOSS ...]

For each loss (or each named one) with a counterpart: milliseconds (best of interleaved runs) and peak MiB (of tensors made by one forward
and backward), and the ratios ours / PML: below 1.0 ours is faster or smaller. Losses over classes run at every B, C, d and K that fits (the
discriminative loss's d is C); "-" marks a side that does not fit or that PML does not have. CPU, one thread.
`benchmarks/scale.py` measures the growth with C.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from pytorch_metric_learning import losses, miners, regularizers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from dml_core.losses.registry import build_loss

BATCH_SIZES, CLASS_COUNTS, DIMS, CENTRE_COUNTS = (32, 256), (98, 11_318, 100_000), (64, 512), (1, 2, 10)
NUM_SAMPLES_PER_CLASS = 8
MOST_PARAMETER_MIB, MOST_SIMILARITY_MIB, MOST_SQUARE_MIB = 64, 120, 512
SECONDS_PER_CASE, FEWEST_RUNS, MOST_RUNS = 0.5, 2, 50

Step = Callable[[], None]


@dataclass(frozen=True)
class Size:
    """B samples, C classes, d dimensions, K centres per class."""

    batch: int
    classes: int
    dim: int
    centres: int = 1


@dataclass(frozen=True)
class Contest:
    """One of our losses and its counterpart, or None if PML has none."""

    name: str
    options: dict[str, Any]
    peer: Callable[[Size], nn.Module] | None
    note: str = ""
    over_classes: bool = True
    several_centres: bool = False
    square_peer: bool = False


class Mined(nn.Module):
    """A PML loss behind a PML miner, or several PML losses with weights."""

    def __init__(self, *weighted: tuple[float, nn.Module], miner: nn.Module | None = None) -> None:
        super().__init__()
        self.weights = [weight for weight, _ in weighted]
        self.losses = nn.ModuleList(loss for _, loss in weighted)
        self.miner = miner

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted sum."""
        indices = self.miner(embeddings, labels) if self.miner else None
        return sum(weight * loss(embeddings, labels, indices) for weight, loss in zip(self.weights, self.losses, strict=True))


class Ours(nn.Module):
    """The total of one of our losses."""

    def __init__(self, contest: Contest, size: Size) -> None:
        super().__init__()
        options = contest.options | ({"num_centres": size.centres} if contest.several_centres else {})
        self.loss = build_loss(contest.name, options, size.classes, size.dim)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the batch."""
        return self.loss(embeddings, labels).total


def soft_triple_peer(size: Size, regularised: bool) -> nn.Module:
    regulariser = regularizers.SparseCentersRegularizer(size.classes, size.centres) if regularised and size.centres > 1 else None
    return losses.SoftTripleLoss(size.classes, size.dim, size.centres, weight_regularizer=regulariser, weight_reg_weight=0.2)


def tuplet_peer(size: Size) -> nn.Module:
    return Mined((1.0, losses.TupletMarginLoss()), (0.5, losses.IntraPairVarianceLoss()))


def contests() -> list[Contest]:
    def batch_hard(size: Size) -> nn.Module:
        return Mined((1.0, losses.TripletMarginLoss(smooth_loss=True)), miner=miners.BatchHardMiner())

    def semi_hard(size: Size) -> nn.Module:
        return Mined((1.0, losses.TripletMarginLoss(0.2)), miner=miners.TripletMarginMiner(0.2, "semihard"))

    return [
        Contest("normalised_softmax", {}, lambda size: losses.NormalizedSoftmaxLoss(size.classes, size.dim)),
        Contest("proxy_nca", {}, lambda size: losses.ProxyNCALoss(size.classes, size.dim)),
        Contest("softtriple", {"regulariser_weight": 0.0}, lambda size: soft_triple_peer(size, False), "no regulariser", True, True),
        Contest("softtriple", {}, lambda size: soft_triple_peer(size, True), "regulariser", True, True, True),
        Contest("tuplet_margin", {"negatives": "all"}, tuplet_peer, "all negatives", over_classes=False),
        Contest("tuplet_margin", {}, tuplet_peer, "random negatives; PML all", over_classes=False),
        Contest("triplet_batch_hard", {}, batch_hard, over_classes=False),
        Contest("triplet_semi_hard", {}, semi_hard, over_classes=False),
        Contest("contrastive", {}, lambda size: losses.ContrastiveLoss(), over_classes=False),
        *(
            Contest(name, {}, None)
            for name in ("softmax", "heated_up_softmax", "discriminative", "sgsl", "l2_constrained_softmax", "center_loss", "ring_loss")
        ),
        Contest("hardtriple", {}, None, several_centres=True),
    ]


def main() -> None:
    torch.set_num_threads(1)
    entered = [contest for contest in contests() if not sys.argv[1:] or contest.name in sys.argv[1:]]
    if unknown := {*sys.argv[1:]} - {contest.name for contest in entered}:
        known = ", ".join(dict.fromkeys(contest.name for contest in contests()))
        raise SystemExit(f"unknown loss '{min(unknown)}' (known: {known})")
    print(f"{'loss':24}{'':28}{'B':>5}{'C':>8}{'d':>8}{'K':>4}{'ms':>9}{'PML ms':>9}{'ratio':>7}{'MiB':>8}{'PML MiB':>9}{'ratio':>7}")
    ratios: list[float] = []
    for contest in entered:
        for size in sizes(contest):
            ratios += run(contest, size)
    print(f"\nlargest time ratio ours / PML: {max(ratios, default=math.nan):.2f}")


def sizes(contest: Contest) -> Iterator[Size]:
    """Yield all sizes at which one forward and backward of ours fits."""
    if not contest.over_classes:
        yield from (Size(batch, batch // NUM_SAMPLES_PER_CLASS, dim) for batch, dim in product(BATCH_SIZES, DIMS))
        return
    for batch, classes, dim, centres in product(BATCH_SIZES, CLASS_COUNTS, DIMS, CENTRE_COUNTS if contest.several_centres else (1,)):
        if contest.name == "discriminative":  # its centroids are the axes: no parameters, d = C
            if dim == DIMS[0] and mib(batch * classes) <= MOST_SIMILARITY_MIB:
                yield Size(batch, classes, classes)
            continue
        if mib(classes * centres * dim) <= MOST_PARAMETER_MIB and mib(batch * classes * centres) <= MOST_SIMILARITY_MIB:
            yield Size(batch, classes, dim, centres)


def run(contest: Contest, size: Size) -> list[float]:
    """Print one line; return the ratio of times, if there is a peer."""
    ours = Ours(contest, size)
    fits = not (contest.square_peer and size.centres > 1 and mib((size.classes * size.centres) ** 2) > MOST_SQUARE_MIB)
    peer = contest.peer(size) if contest.peer and fits else None
    steps = [step(ours, size), *([step(peer, size)] if peer else [])]
    milliseconds, peak = best_milliseconds(steps), [peak_mib(one) for one in steps]
    cells = [f"{milliseconds[0]:9.2f}", f"{milliseconds[1]:9.2f}{milliseconds[0] / milliseconds[1]:7.2f}" if peer else f"{'-':>9}{'-':>7}"]
    cells += [f"{peak[0]:8.1f}", f"{peak[1]:9.1f}{peak[0] / peak[1]:7.2f}" if peer else f"{'-':>9}{'-':>7}"]
    print(f"{contest.name:24}{contest.note:28}{size.batch:5}{size.classes:8}{size.dim:8}{size.centres:4}{''.join(cells)}", flush=True)
    return [milliseconds[0] / milliseconds[1]] if peer else []


def step(loss: nn.Module, size: Size) -> Step:
    """Return a function for one forward and backward over a batch with 8 samples per class."""
    random = torch.Generator().manual_seed(0)
    embeddings = torch.randn(size.batch, size.dim, generator=random, requires_grad=True)
    labels = (torch.arange(size.batch) // NUM_SAMPLES_PER_CLASS) % size.classes

    def once() -> None:
        torch.autograd.backward(loss(embeddings, labels))
        embeddings.grad = None  # so that every run starts with the same memory
        loss.zero_grad()

    return once


def best_milliseconds(steps: list[Step]) -> list[float]:
    """Return the best time of each step, run in turns."""
    for one in steps:
        one()
    best, began, num_runs = [math.inf] * len(steps), time.perf_counter(), 0
    while num_runs < FEWEST_RUNS or (num_runs < MOST_RUNS and time.perf_counter() - began < SECONDS_PER_CASE):
        for i, one in enumerate(steps):
            start = time.perf_counter()
            one()
            best[i] = min(best[i], 1000 * (time.perf_counter() - start))
        num_runs += 1
    return best


def peak_mib(once: Step) -> float:
    """Return the peak memory of the tensors of one run, without parameters and embeddings."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        once()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak / 2**20


def mib(num_floats: int) -> float:
    return 4 * num_floats / 2**20


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    main()
