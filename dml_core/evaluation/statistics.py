"""Which of several systems is better, from runs that share their seeds: paired differences, corrected for how many were looked at.

Runs of one seed share classes, order and the initial weights of what they have in common, so systems are compared seed by seed. Over
several datasets they are compared by ranks (Demsar, JMLR 2006).

Shapes: S seeds, K systems, B blocks (datasets, or datasets and seeds).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import nctdtr, stdtr, stdtrit

from dml_core.evaluation.confidence import mean_over_seeds

MOST_SEEDS = 10_000


@dataclass(frozen=True)
class PairedDifference:
    """A system less another, over the seeds that both ran with.

    Attributes:
        mean, half_width: of the differences, the latter of the 95 % interval (Student's t).
        num_seeds: how many there are.
        p_value: of the paired two-sided t test that the mean is 0, not corrected for other comparisons.
    """

    mean: float
    half_width: float
    num_seeds: int
    p_value: float


def paired_difference(values_S: Sequence[float], references_S: Sequence[float]) -> PairedDifference:
    """The mean difference, seed by seed.

    Args:
        values_S: one for each seed, at least two.
        references_S: of the other system, in the same order of seeds.

    Raises:
        ValueError: not as many of both, or fewer than two.
    """
    if len(values_S) != len(references_S) or len(values_S) < 2:
        raise ValueError(f"a paired difference needs two seeds or more of both, found {len(values_S)} and {len(references_S)}")
    differences_S = np.subtract(values_S, references_S, dtype=np.float64)
    mean, half_width = mean_over_seeds(list(differences_S))
    error = float(differences_S.std(ddof=1)) / len(differences_S) ** 0.5
    certain = 1.0 if mean == 0 else 0.0  # where the differences do not vary
    p_value = float(2 * stdtr(len(differences_S) - 1, -abs(mean) / error)) if error > 0 else certain
    return PairedDifference(mean, half_width, len(differences_S), p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values as Holm's step-down correction makes them: finds below 0.05 have that chance of any false one among them (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * np.asarray(p_values, dtype=np.float64)[order]))
    return [float(p_value) for p_value in adjusted]


def power(difference: float, deviation: float, num_seeds: int, level: float = 0.05) -> float:
    """The chance that the paired t test over `num_seeds` finds a true mean difference.

    Args:
        difference: the true mean, above 0.
        deviation: standard deviation of the differences, above 0.
        num_seeds: at least two.
        level: of the two-sided test.
    """
    threshold = float(stdtrit(num_seeds - 1, 1 - level / 2))
    shift = difference / deviation * num_seeds**0.5
    return float(1 - nctdtr(num_seeds - 1, shift, threshold) + nctdtr(num_seeds - 1, shift, -threshold))


def smallest_difference(deviation: float, num_seeds: int, wanted_power: float = 0.8, level: float = 0.05) -> float:
    """The smallest true mean difference that so many seeds find with the wanted power, in the unit of `deviation`."""
    if deviation == 0:
        return 0.0
    low, high = 0.0, 1.0
    while power(high, 1.0, num_seeds, level) < wanted_power:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, 1.0, num_seeds, level) < wanted_power else (low, middle)
    return high * deviation


def seeds_needed(difference: float, deviation: float, wanted_power: float = 0.8, level: float = 0.05) -> int | None:
    """The fewest seeds that find a true mean difference with the wanted power; None where more than MOST_SEEDS were needed."""
    if deviation == 0:
        return 2
    low, high = 1, 2
    while power(difference, deviation, high, level) < wanted_power:
        low, high = high, 2 * high
        if high > 2 * MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if power(difference, deviation, middle, level) < wanted_power else (low, middle)
    return high if high <= MOST_SEEDS else None


@dataclass(frozen=True)
class RankComparison:
    """Systems compared by their ranks over blocks: Friedman's test, then Nemenyi's.

    Attributes:
        mean_ranks: of each system, 1 being best; systems that are equal in a block share its ranks.
        p_value: of Friedman's test that all systems are alike (chi-squared, corrected for ties).
        critical_difference: mean ranks that are farther apart differ at the 0.05 level (Nemenyi).
        num_blocks: over how many.
    """

    mean_ranks: tuple[float, ...]
    p_value: float
    critical_difference: float
    num_blocks: int


def compare_ranks(scores_BK: NDArray[np.float64]) -> RankComparison:
    """Rank K systems in each of B blocks, the highest score first.

    Raises:
        ValueError: fewer than three systems or two blocks: nothing to compare by ranks.
    """
    from scipy.stats import friedmanchisquare, rankdata, studentized_range  # a second to import

    num_blocks, num_systems = scores_BK.shape
    if num_systems < 3 or num_blocks < 2:
        raise ValueError(f"ranks need three systems and two blocks or more, found {num_systems} and {num_blocks}")
    ranks_BK = rankdata(-scores_BK, axis=1)
    alike = bool((ranks_BK == ranks_BK[:, :1]).all())
    p_value = 1.0 if alike else float(friedmanchisquare(*scores_BK.T).pvalue)
    quantile = float(studentized_range.ppf(0.95, num_systems, np.inf)) / 2**0.5
    critical = quantile * (num_systems * (num_systems + 1) / (6 * num_blocks)) ** 0.5
    return RankComparison(tuple(map(float, ranks_BK.mean(axis=0))), p_value, critical, num_blocks)
