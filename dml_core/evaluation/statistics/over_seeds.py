"""A metric over the seeds of one system: its mean and, for enough seeds, its 95 % interval."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from dml_core.evaluation.statistics.paired import MIN_SEEDS

TOO_FEW = f"too few to decide, at least {MIN_SEEDS} are needed"


class Summary(NamedTuple):
    """A metric over the seeds of one variant: mean and half-width of the 95 % interval (Student's t); None if there are too few seeds."""

    mean: float
    half_width: float | None
    num_seeds: int

    def __str__(self) -> str:
        spread = f" ± {100 * self.half_width:.1f}" if self.half_width is not None else ""
        return f"{100 * self.mean:.1f}{spread}"


def summarise_seeds(values: Sequence[float]) -> Summary:
    """Return the mean of runs and half of its 95 % interval, None for fewer than MIN_SEEDS runs.

    Two values may be equal, or far apart, by chance: with the same spread, their interval is 3.6 times as wide as that of three.
    """
    mean, num_seeds = float(np.mean(values)), len(values)
    if num_seeds < MIN_SEEDS:
        return Summary(mean, None, num_seeds)
    half_width = float(stdtrit(num_seeds - 1, 0.975)) * (float(np.std(values, ddof=1)) / num_seeds**0.5)
    return Summary(mean, half_width, num_seeds)


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
