"""A metric over the seeds of one system: its mean and, for enough seeds, its 95 % interval."""

from collections.abc import Collection, Sequence

import numpy as np
from scipy.special import stdtrit

from dml_core.evaluation.statistics.confidence import Summary
from dml_core.evaluation.statistics.paired import MIN_SEEDS

TOO_FEW = f"too few to decide, at least {MIN_SEEDS} are needed"


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of runs, and half of its 95 % interval (Student's t); None for fewer than MIN_SEEDS runs.

    Two values may be equal, or far apart, by chance: with the same spread, their interval is 3.6 times as wide as that of three.
    """
    mean = float(np.mean(values))
    if len(values) < MIN_SEEDS:
        return mean, None
    return mean, float(stdtrit(len(values) - 1, 0.975)) * (float(np.std(values, ddof=1)) / len(values) ** 0.5)


def summarise_seeds(values: Sequence[float]) -> Summary:
    """Return mean and interval as a `Summary`; no interval for fewer than MIN_SEEDS runs."""
    return Summary(*mean_and_half_width(values), len(values))


def says_seeds(numbers: Collection[int]) -> str:
    """Return what a table's figures are, for its legend: `mean ± half of the 95 % interval over 5 seeds`.

    Args:
        numbers: numbers of seeds of its rows; different ones are shown as a range.
    """
    least, most = min(numbers), max(numbers)
    if most == 1:
        return "one seed"
    counted = f"{least} to {most} seeds" if least < most else f"{most} seeds"
    if most < MIN_SEEDS:
        return f"mean over {counted} ({TOO_FEW})"
    return f"mean ± half of the 95 % interval over {counted}"
