"""Confidence intervals of a mean over queries, and over classes, whose queries succeed and fail together.

The standard error is the jackknife's, which omits each unit once. The interval is Student's t on the logit, with one degree of freedom less
than units. A bootstrap's percentile intervals are too narrow for few units: with 4 classes its 95 % intervals contain the truth 8 times in
10 (tests/evaluation/test_coverage.py).

Shapes: Q queries or other units, M metrics, U units.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit, stdtrit  # scipy.stats takes a second to import

SAME = 1e-12  # a fraction's standard error below this is only rounding


def interval_over_units(
    fractions_QM: NDArray[np.float64], codes_Q: NDArray[np.int64], confidence: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lower and upper ends (M,) of each metric's interval for the mean over queries, with the units as a random sample.

    Both are NaN if the units' variation is unknown: there is one unit, or all have the same mean.

    Args:
        fractions_QM: the metrics of each query, from 0 to 1.
        codes_Q: the query's class, for an interval over classes; a separate code for each query, for one over queries.
        confidence: coverage of the interval.
    """
    means_M, units_Q = fractions_QM.mean(axis=0), np.unique(codes_Q, return_inverse=True)[1]
    sizes_U = np.bincount(units_Q)
    num_units = len(sizes_U)
    if num_units < 2:
        return np.full_like(means_M, np.nan), np.full_like(means_M, np.nan)
    sums_UM = np.stack([np.bincount(units_Q, weights=column) for column in fractions_QM.T], axis=1)
    without_UM = (sums_UM.sum(axis=0) - sums_UM) / (sizes_U.sum() - sizes_U)[:, None]
    error_M = np.sqrt((num_units - 1) * without_UM.var(axis=0))
    varying_M = np.where(error_M > SAME, means_M, np.nan)
    half_M = float(stdtrit(num_units - 1, (1 + confidence) / 2)) * error_M / (varying_M * (1 - varying_M))
    return expit(logit(varying_M) - half_M), expit(logit(varying_M) + half_M)
