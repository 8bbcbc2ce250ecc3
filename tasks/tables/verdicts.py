"""What the runs say of a printed figure: whether it may be one run of the same system, and whether the mean is equal to it.

A printed figure is one run. It is *compatible* with one run of ours where it lies in the 95 % prediction interval of one more run,
mean ± t s sqrt(1 + 1/n), with n seeds, their standard deviation s and t with n - 1 degrees of freedom (Hahn and Meeker, Statistical
Intervals, 1991); else ours is *above* or *below* it. Where the paper chose its epoch on the test classes, the runs that are
judged have chosen theirs alike (`tasks.tables.runs.printed_epoch`).

That the *mean* is equal to the figure within a tolerance is a statement of its own: the 90 % interval of the mean lies within p ± t (two
one-sided tests at 0.05, Schuirmann 1987). Fewer than three seeds decide nothing. A share of few queries takes few values, so that both
intervals have a floor (`judge`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtri, stdtrit

from dml_core.evaluation.statistics import MIN_SEEDS

Judgement = Literal["compatible", "above", "below", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What the runs say of a published figure.

    Attributes:
        judgement: compatible, above, below or undecided.
        low, high: ends of the prediction interval of one run; None for fewer than MIN_SEEDS seeds.
        is_equal: whether the mean is equal to the figure within the tolerance.
        num_seeds: how many values there are.
    """

    judgement: Judgement
    low: float | None
    high: float | None
    is_equal: bool
    num_seeds: int

    def __str__(self) -> str:
        if self.judgement == "undecided":
            return f"undecided ({'one seed' if self.num_seeds == 1 else f'{self.num_seeds} seeds'}; {MIN_SEEDS} decide)"
        return f"{self.judgement}, mean equal" if self.is_equal else self.judgement


def judge(
    values: Sequence[float],
    published: float,
    tolerance: float,
    num_queries: int | None = None,
    whole: float = 1.0,
    rounding: float = 0.0,
) -> Verdict:
    """The verdict on one published figure; all in one unit.

    Where the values are shares of queries, s is one query at least, and half of the interval of the mean at least that of the binomial
    variance of the share at the mean, which is known and so has the normal's quantile.

    Args:
        values: one for each seed, at least one.
        published: p.
        tolerance: t of the equivalence test, above 0.
        num_queries: of which the values are the share found; None for other scores.
        whole: the score of all queries found: 1, or 100 for per cent.
        rounding: half of the printed figure's last place, by which the prediction interval is wider.
    """
    num_seeds, mean = len(values), float(np.mean(values))
    if num_seeds < MIN_SEEDS:
        return Verdict("undecided", None, None, False, num_seeds)
    deviation = float(np.std(values, ddof=1))
    half_90 = float(stdtrit(num_seeds - 1, 0.95)) * deviation / num_seeds**0.5
    if num_queries is not None:
        share = min(max(mean / whole, 1 / num_queries), 1 - 1 / num_queries)
        half_90 = max(half_90, float(ndtri(0.95)) * whole * (share * (1 - share) / num_queries / num_seeds) ** 0.5)
        deviation = max(deviation, whole / num_queries)
    error = deviation * (1 + 1 / num_seeds) ** 0.5
    half_width = float(stdtrit(num_seeds - 1, 0.975)) * error + rounding
    low, high = mean - half_width, mean + half_width
    judgement: Judgement = "above" if published < low else "below" if published > high else "compatible"
    return Verdict(judgement, low, high, half_90 > 0 and abs(mean - published) + half_90 <= tolerance, num_seeds)
