"""How sure a number is: bootstrap intervals over queries or classes, and the interval of a mean over seeds.

The bootstrap draws as many queries (or whole classes, whose queries succeed and fail together) as there are, with replacement, and takes
the mean anew; the interval holds the middle part of those means (Efron 1979, percentile method). Over seeds, which are few, it is
Student's t.

Shapes: Q queries or other units that are drawn, B replicates, M metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit  # Student's t; scipy.stats takes a second to import


def bootstrap_means(values_QM: NDArray[np.float64], codes_Q: NDArray[np.int64], num_replicates: int, seed: int) -> NDArray[np.float64]:
    """Means (B, M) over resampled units: samples with one code are drawn together.

    Args:
        values_QM: the metrics of each query.
        codes_Q: the query's class, to draw classes; a code of its own for each, to draw queries.
        num_replicates: B.
        seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    units, codes_Q = np.unique(codes_Q, return_inverse=True)
    sums_UM = np.stack([np.bincount(codes_Q, weights=column) for column in values_QM.T], axis=1)
    sizes_U = np.bincount(codes_Q).astype(np.float64)
    means_BM = np.empty((num_replicates, values_QM.shape[1]))
    for replicate in range(num_replicates):
        draws_U = np.bincount(generator.integers(0, len(units), len(units)), minlength=len(units)).astype(np.float64)
        means_BM[replicate] = draws_U @ sums_UM / (draws_U @ sizes_U)
    return means_BM


def percentile_interval(means_BM: NDArray[np.float64], confidence: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lower and upper end (M,) of the middle `confidence` of the replicates."""
    low, high = np.quantile(means_BM, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high


def mean_over_seeds(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Mean of a metric over runs and the half width of its interval; NaN for the width of a single run, which tells nothing of spread."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, np.nan
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return mean, float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * error


@dataclass(frozen=True)
class Summary:
    """A metric over the seeds of one variant: mean and half-width of the 95 % interval (Student's t); no interval for one seed."""

    mean: float
    half_width: float | None
    num_seeds: int

    def __str__(self) -> str:
        spread = f" ± {100 * self.half_width:.1f}" if self.half_width is not None else ""
        return f"{100 * self.mean:.1f}{spread}"


def summarise(values: Sequence[float]) -> Summary:
    """Mean and 95 % interval of one metric over seeds."""
    mean, half_width = mean_over_seeds(values)
    return Summary(mean, half_width if len(values) > 1 else None, len(values))
