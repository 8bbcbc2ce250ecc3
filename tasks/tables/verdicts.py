"""Verdicts on published values: whether one may be a run of the measured system, and whether it equals the mean.

A published value is one run. It is *compatible* with the measured runs if it is inside the 95 % prediction interval of one more run,
mean ± t s sqrt(1 + 1/n), with n seeds, their standard deviation s and t with n - 1 degrees of freedom (Hahn and Meeker, Statistical
Intervals, 1991); otherwise the measured runs are *above* or *below* it. If the paper chose its epoch on the test classes, the judged runs
chose theirs the same way (`tasks.tables.runs.printed_epoch`).

Equality of the *mean* and the published value p within a tolerance is a separate statement: the 90 % interval of the mean is inside
p ± tolerance (two one-sided tests at 0.05, Schuirmann 1987). Fewer than three seeds decide nothing. A share of few queries takes few
values, so both intervals have a minimum width (`judge`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtri, stdtrit

from dml_core.evaluation.statistics.paired import MIN_SEEDS

Judgement = Literal["compatible", "above", "below", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """Verdict of the runs on a published value.

    Attributes:
        judgement: compatible, above, below or undecided.
        low, high: ends of the prediction interval of one run; None for fewer than MIN_SEEDS seeds.
        is_equal: whether the mean equals the published value within the tolerance.
        num_seeds: number of values.
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
    """Judge one published value; all numbers are in one unit.

    If the values are shares of queries, s is at least one query, and half of the interval of the mean is at least that of the binomial
    variance of the share at the mean, which is known and therefore takes the normal quantile.

    Args:
        values: one per seed, at least one.
        published: the published value p.
        tolerance: tolerance of the equivalence test, above 0.
        num_queries: number of queries of which the values are the share found; None for other scores.
        whole: score if all queries are found: 1, or 100 for per cent.
        rounding: half of the published value's last decimal place, which widens the prediction interval.
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
