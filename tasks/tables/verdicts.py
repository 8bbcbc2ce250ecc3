"""Whether a measured mean is a published figure: equivalence within a tolerance, not the absence of a difference.

With values over n seeds, a published figure p and a tolerance t: *equal* if the 90 % interval of the mean lies within p ± t (two one-sided
tests at 0.05, Schuirmann 1987); *above* or *below* if the 95 % interval lies wholly outside on that side; else *undecided*. Both intervals
are Student's t. One seed decides nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from dml_core.evaluation.confidence import mean_over_seeds

Judgement = Literal["equal", "above", "below", "undecided"]
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Verdict:
    """What the runs say of a published figure.

    Attributes:
        judgement: equal, above, below or undecided.
        mean, half_width: of the measured values, the latter of the 95 % interval; None for one seed.
        num_seeds: how many values there are.
        seeds_to_decide: of an undecided one, how many seeds would decide it if mean and spread stay; None where one seed tells no spread
            or where more than MOST_SEEDS were needed.
    """

    judgement: Judgement
    mean: float
    half_width: float | None
    num_seeds: int
    seeds_to_decide: int | None = None

    def __str__(self) -> str:
        if self.judgement != "undecided":
            return self.judgement
        if self.num_seeds < 2:
            return "undecided (one seed)"
        more = f"more than {MOST_SEEDS}" if self.seeds_to_decide is None else f"{self.seeds_to_decide}"
        return f"undecided ({more} seeds would tell)"


def judge(values: Sequence[float], published: float, tolerance: float) -> Verdict:
    """The verdict on one published figure; all in one unit.

    Args:
        values: one for each seed, at least one.
        published: p.
        tolerance: t, above 0.
    """
    mean, half_width = mean_over_seeds(values)
    if len(values) < 2:
        return Verdict("undecided", mean, None, 1)
    half_width_90 = mean_over_seeds(values, 0.90)[1]
    judgement = _judgement(mean - published, half_width_90, half_width, tolerance)
    if judgement != "undecided":
        return Verdict(judgement, mean, half_width, len(values))
    return Verdict(judgement, mean, half_width, len(values), _seeds_to_decide(values, published, tolerance))


def _judgement(difference: float, half_width_90: float, half_width_95: float, tolerance: float) -> Judgement:
    if abs(difference) + half_width_90 <= tolerance:
        return "equal"
    if abs(difference) - half_width_95 > tolerance:
        return "above" if difference > 0 else "below"
    return "undecided"


def _seeds_to_decide(values: Sequence[float], published: float, tolerance: float) -> int | None:
    """The fewest seeds that decide, where mean and standard deviation stay; intervals only shrink with them."""
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))

    def decides(num_seeds: int) -> bool:
        half_width_90, half_width_95 = (stdtrit(num_seeds - 1, level) * deviation / num_seeds**0.5 for level in (0.95, 0.975))
        return _judgement(mean - published, half_width_90, half_width_95, tolerance) != "undecided"

    found = bisect_left(range(MOST_SEEDS + 1), True, lo=len(values) + 1, key=decides)
    return found if found <= MOST_SEEDS else None
