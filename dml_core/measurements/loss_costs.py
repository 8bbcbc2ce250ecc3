"""Growth of the discriminative loss's cost with classes and samples, compared with the sum over all triplets (section 3.3, table 1).

Measures CPU time on this machine: only the run's seed matters, and unlike other measurements the digits differ each time. Shapes: N
samples, D dimensions.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from dml_core.config import Config
from dml_core.evaluation.threads import one_thread
from dml_core.losses.discriminative import Discriminative, DiscriminativeConfig
from dml_core.measurements.contract import FinishedRun

METRICS = ("cost_exponent_in_classes", "cost_exponent_in_samples", "cost_exponent_in_samples_all_triplets")
NUM_REPEATS = 5
# Two numbers each, between which the cost grows: of classes with 128 samples, of samples with 1000 classes, and of samples in triplets.
CLASSES, SAMPLES, TRIPLET_SAMPLES = (2_000, 16_000), (1_024, 4_096), (128, 320)


def measure(run: FinishedRun, options: Config, folder: Path) -> dict[str, float]:
    """Return the exponents of the CPU time: 1 is linear, 2 quadratic."""
    with one_thread():  # whose CPU time is measured
        exponents = (
            exponent(CLASSES, lambda number: discriminative_seconds(run.seed, 128, number)),
            exponent(SAMPLES, lambda number: discriminative_seconds(run.seed, number, 1_000)),
            exponent(TRIPLET_SAMPLES, lambda number: all_triplets_seconds(run.seed, number)),
        )
    return dict(zip(METRICS, exponents, strict=True))


def exponent(numbers: tuple[int, int], seconds: Callable[[int], float]) -> float:
    """Return p of a cost proportional to number ** p, from two numbers."""
    few, many = numbers
    return math.log(seconds(many) / seconds(few)) / math.log(many / few)


def discriminative_seconds(seed: int, num_samples: int, num_classes: int) -> float:
    """Return the CPU time of the loss and its gradient for one batch; centroids are one-hot, so there are as many dimensions as classes."""
    embeddings_ND, labels_N = _batch(seed, num_samples, num_classes, num_classes)
    loss = Discriminative(DiscriminativeConfig(), num_classes, num_classes)
    return _cpu_seconds(lambda: torch.autograd.grad(loss(embeddings_ND, labels_N).total, embeddings_ND))


def all_triplets_seconds(seed: int, num_samples: int) -> float:
    """Return the CPU time of the sum over (i, j, k) of ||x_i - x_j|| - ||x_i - x_k||, with every triplet separate, as in equation 1."""
    embeddings_ND, labels_N = _batch(seed, num_samples, 4, 64)

    def every_triplet() -> None:
        distance_NN = torch.cdist(embeddings_ND, embeddings_ND)
        same_NN = labels_N[:, None] == labels_N
        valid_NNN = same_NN[:, :, None] & ~same_NN[:, None, :]
        torch.autograd.grad((distance_NN[:, :, None] - distance_NN[:, None, :])[valid_NNN].sum(), embeddings_ND)

    return _cpu_seconds(every_triplet)


def _batch(seed: int, num_samples: int, num_classes: int, num_dimensions: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings_ND = functional.normalize(torch.randn(num_samples, num_dimensions, generator=generator)).requires_grad_()
    return embeddings_ND, torch.arange(num_samples) % num_classes


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Return the minimum CPU time of five runs after a warm-up; other load on the machine hardly affects it."""
    work()
    times = []
    for _ in range(NUM_REPEATS):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)
