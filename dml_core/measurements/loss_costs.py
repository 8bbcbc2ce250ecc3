"""How the discriminative loss's cost grows with classes and samples, beside that of the sum over all triplets (section 3.3, table 1).

Processor times of this machine: of the run only the seed counts, and unlike other measurements it gives other digits each time.
Shapes: N samples, D dimensions.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from dml_core.config import Config
from dml_core.losses.registry import build_loss
from dml_core.measurements.contract import FinishedRun

METRICS = ("cost_exponent_in_classes", "cost_exponent_in_samples", "cost_exponent_in_samples_all_triplets")
NUM_GOES = 5
FIXED_SAMPLES, FIXED_CLASSES = 128, 1_000


class Options(Config):
    """From how many to how many the growth is measured.

    Attributes:
        classes: of the discriminative loss, with 128 samples.
        samples: of the discriminative loss, with 1000 classes.
        triplet_samples: of the sum over all triplets, of four classes.
    """

    classes: tuple[int, int] = (2_000, 16_000)
    samples: tuple[int, int] = (1_024, 4_096)
    triplet_samples: tuple[int, int] = (128, 320)


def measure(run: FinishedRun, options: Options, folder: Path) -> dict[str, float]:
    """The exponents of processor time: 1 is linear, 2 quadratic."""
    with one_thread():
        exponents = (
            exponent(options.classes, lambda number: discriminative_seconds(run.seed, FIXED_SAMPLES, number)),
            exponent(options.samples, lambda number: discriminative_seconds(run.seed, number, FIXED_CLASSES)),
            exponent(options.triplet_samples, lambda number: all_triplets_seconds(run.seed, number)),
        )
    return dict(zip(METRICS, exponents, strict=True))


def exponent(numbers: tuple[int, int], seconds: Callable[[int], float]) -> float:
    """p of a cost proportional to number ** p, from two numbers."""
    few, many = numbers
    return math.log(seconds(many) / seconds(few)) / math.log(many / few)


def discriminative_seconds(seed: int, num_samples: int, num_classes: int) -> float:
    """Of the loss and its gradient for one batch; its centroids are one-hot, so there are as many dimensions as classes."""
    embeddings_ND, labels_N = _batch(seed, num_samples, num_classes, num_classes)
    loss = build_loss("discriminative", {}, num_classes, num_classes)
    return _cpu_seconds(lambda: torch.autograd.grad(loss(embeddings_ND, labels_N).total, embeddings_ND))


def all_triplets_seconds(seed: int, num_samples: int) -> float:
    """Of the sum over (i, j, k) of ||x_i - x_j|| - ||x_i - x_k||, each triplet taken by itself, as equation 1 has it."""
    embeddings_ND, labels_N = _batch(seed, num_samples, 4, 64)

    def every_triplet() -> None:
        distance_NN = torch.cdist(embeddings_ND, embeddings_ND)
        same_NN = labels_N[:, None] == labels_N
        valid_NNN = same_NN[:, :, None] & ~same_NN[:, None, :]
        torch.autograd.grad((distance_NN[:, :, None] - distance_NN[:, None, :])[valid_NNN].sum(), embeddings_ND)

    return _cpu_seconds(every_triplet)


@contextmanager
def one_thread() -> Iterator[None]:
    """What follows is worked out in this thread alone, whose processor time is what is measured."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _batch(seed: int, num_samples: int, num_classes: int, num_dimensions: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings_ND = functional.normalize(torch.randn(num_samples, num_dimensions, generator=generator)).requires_grad_()
    return embeddings_ND, torch.arange(num_samples) % num_classes


def _cpu_seconds(work: Callable[[], object]) -> float:
    """The least processor time of five goes after one to warm up; what else the machine does hardly counts in it."""
    work()
    times = []
    for _ in range(NUM_GOES):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)
