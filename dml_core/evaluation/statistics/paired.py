"""Differences of two systems from runs with shared seeds, and the power of their comparison.

Runs of one seed share classes, order and the initial weights of their common parts, so systems are compared seed by seed.
`dml_core.evaluation.statistics.comparing` compares whole tables, `mean_ranks` systems over several datasets.

Shapes: S seeds, C classes, Q queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite, sqrt
from numbers import Real

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtr, chdtri, ndtr, stdtr, stdtrit

from dml_core.errors import EvaluationError

MIN_SEEDS, MIN_CLASSES = 3, 10  # minimum for a verdict: two values may be equal by chance, which says nothing about their spread
MOST_SEEDS = 10_000
MANY_SEEDS, LARGEST_NORMAL = 30, 9.0  # for the quadrature in `power`
SAME = 1e-9  # relative to the values: differences with less spread are considered constant


@dataclass(frozen=True)
class PairedDifference:
    """One system minus another, over the seeds that both ran with.

    Attributes:
        mean, half_width: mean of the differences, and half-width of its 95 % interval (Student's t).
        num_seeds: number of shared seeds.
        p_value: p value of the paired two-sided t test that the mean is 0, not corrected for other comparisons.
        deviation: standard deviation of the differences, or its floor if that is larger.
    """

    mean: float
    half_width: float
    num_seeds: int
    p_value: float
    deviation: float


def paired_difference(
    values_S: Sequence[float], references_S: Sequence[float], num_queries: int | None = None, whole: float = 1.0
) -> PairedDifference:
    """Return the mean difference, seed by seed.

    A share of few queries has few possible values, so a few differences may be equal by chance: shares of queries have a floor on the
    spread (`least_deviation`). Constant differences without a floor get the sign test's p value, 2 / 2^S, instead of 0.

    Args:
        values_S: one score per seed, at least two.
        references_S: scores of the other system, in the same order of seeds.
        num_queries: number of queries, if the scores are shares of queries, such as Recall@K; None for other scores.
        whole: score of a full share: 1, or 100 for per cent.

    Raises:
        EvaluationError: the lengths differ or are below two, a score is not finite, or there are no queries.
    """
    if len(values_S) != len(references_S) or len(values_S) < 2:
        raise EvaluationError(f"a paired difference needs two seeds or more of both, found {len(values_S)} and {len(references_S)}")
    for score in (*values_S, *references_S):
        check_score("a paired difference", score)
    if num_queries is not None and num_queries < 1:
        raise EvaluationError(f"num_queries is {num_queries}; scores of no query have no difference")
    differences_S = np.subtract(values_S, references_S, dtype=np.float64)
    num_seeds, mean, deviation = len(differences_S), float(differences_S.mean()), float(differences_S.std(ddof=1))
    if num_queries is not None:
        deviation = max(deviation, whole * least_deviation(mean / whole, num_queries))
    scale = float(np.abs([values_S, references_S]).max())
    if deviation <= SAME * scale:
        return PairedDifference(mean, 0.0, num_seeds, 1.0 if abs(mean) <= SAME * scale else 2.0 ** (1 - num_seeds), 0.0)
    p_value = float(2 * stdtr(num_seeds - 1, -abs(mean) / deviation * num_seeds**0.5))
    return PairedDifference(mean, half_width_of(deviation, num_seeds), num_seeds, p_value, deviation)


def check_score(what: str, score: object) -> None:
    """Raise an EvaluationError about `what` if a score is no finite number."""
    if not isinstance(score, Real) or not isfinite(score):
        raise EvaluationError(f"{what}: the score {score!r} is no finite number; leave its run out")


def least_deviation(difference: float, num_queries: int) -> float:
    """Return the smallest possible standard deviation of a difference of two shares of the same queries.

    They disagree on at least |d| of the queries and on at least one. A query's difference is then 1, 0 or -1, with variance |d| - d^2
    (McNemar 1947); the share's variance is 1/Q of it.

    Args:
        difference: d, of the two shares, from -1 to 1.
        num_queries: Q.
    """
    disagreeing = min(max(abs(difference), 1 / num_queries), 1.0)
    return sqrt(max((disagreeing - difference**2) / num_queries, 1 / num_queries**2))


def half_width_of(deviation: float, num_seeds: int, level: float = 0.05) -> float:
    """Return the half-width of Student's t interval of a mean at confidence 1 - level."""
    return float(stdtrit(num_seeds - 1, 1 - level / 2)) * deviation / sqrt(num_seeds)


def probabilities(difference: PairedDifference, points: float) -> tuple[float, float, float]:
    """Return the probabilities that the true mean difference is above `points`, within +-`points`, and below -`points`.

    Posterior of the mean of normal differences under the non-informative prior: Student's t around their mean (Benavoli et al., JMLR 2017,
    without their correlation, because seeds are independent runs).
    """
    if difference.deviation == 0:
        return float(difference.mean > points), float(abs(difference.mean) <= points), float(difference.mean < -points)
    error, freedom = difference.deviation / difference.num_seeds**0.5, difference.num_seeds - 1
    better = float(stdtr(freedom, (difference.mean - points) / error))
    worse = float(stdtr(freedom, (-points - difference.mean) / error))
    return better, max(0.0, 1.0 - better - worse), worse


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's step-down correction: rejecting those below 0.05 has a familywise error of 0.05 (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * np.asarray(p_values, dtype=np.float64)[order]))
    return [float(p_value) for p_value in adjusted]


def power(difference: float, deviation: float, num_seeds: int, level: float = 0.05) -> float:
    """Return the power of the paired t test over `num_seeds` for a true mean difference.

    With z standard normal, V the sample variance divided by the true one, and c the test's threshold,
    the power is P((z + shift)^2 > c^2 V). It is integrated over z for few seeds and over V for many, where it is smooth; SciPy's
    distribution function of the noncentral t (1.17) is wrong for few seeds and large shifts.

    Args:
        difference: the true mean, above 0.
        deviation: standard deviation of the differences, above 0.
        num_seeds: at least two.
        level: level of the two-sided test.
    """
    freedom, nodes, weights = num_seeds - 1, *_nodes()
    threshold = float(stdtrit(freedom, 1 - level / 2))
    shift = difference / deviation * num_seeds**0.5
    if freedom < MANY_SEEDS:
        normals = LARGEST_NORMAL * nodes
        densities = np.exp(-(normals**2) / 2) / (2 * np.pi) ** 0.5
        return float(LARGEST_NORMAL * weights @ (densities * chdtr(freedom, freedom * ((normals + shift) / threshold) ** 2)))
    bounds = threshold * np.sqrt(chdtri(freedom, (1 - nodes) / 2) / freedom)
    return float(weights @ (ndtr(shift - bounds) + ndtr(-shift - bounds)) / 2)


@cache
def _nodes() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes and weights of the Gauss-Legendre quadrature from -1 to 1."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    return nodes, weights


def smallest_difference(deviation: float, num_seeds: int, wanted_power: float = 0.8, level: float = 0.05) -> float:
    """Return the smallest true mean difference that `num_seeds` seeds detect with the wanted power, in the unit of `deviation`."""
    return deviation * _smallest_effect(num_seeds, wanted_power, level)


@cache
def _smallest_effect(num_seeds: int, wanted_power: float, level: float) -> float:
    """Return the smallest effect in standard deviations, the same for all pairs of a table."""
    low, high = 0.0, 1.0
    while power(high, 1.0, num_seeds, level) < wanted_power:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, 1.0, num_seeds, level) < wanted_power else (low, middle)
    return high


def seeds_needed(difference: float, deviation: float, wanted_power: float = 0.8, level: float = 0.05) -> int | None:
    """Return the fewest seeds, at least MIN_SEEDS, that detect a true difference with the wanted power; None if more than MOST_SEEDS."""
    if deviation == 0:
        return MIN_SEEDS
    low, high = MIN_SEEDS - 1, MIN_SEEDS
    while power(difference, deviation, high, level) < wanted_power:
        low, high = high, 2 * high
        if high > 2 * MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if power(difference, deviation, middle, level) < wanted_power else (low, middle)
    return high if high <= MOST_SEEDS else None


def difference_over_classes(
    values_SC: NDArray[np.float64], references_SC: NDArray[np.float64], level: float = 0.05
) -> tuple[float, float] | None:
    """Return the mean difference over seeds and classes, and half of its interval; None for too few seeds or classes.

    It generalises to other classes of the same kind as the test classes, because both seeds and classes are samples: intervals over seeds
    hold only for these test classes. The difference of seed s on class c is m + a_s + b_c + e_sc, all independent.
    The variance is that of the seeds' means over S plus that of the classes' means over C. Each includes the variance of e, which is thus
    counted twice: slightly too wide rather than too narrow. Student's t has Satterthwaite's degrees of freedom (Biometrics 1946).

    Args:
        values_SC: Recall@1 (or another mean over queries) of each class for each seed.
        references_SC: the same of the other system, with the same seeds and classes.
        level: 1 - the confidence.
    """
    num_seeds, num_classes = values_SC.shape
    if num_seeds < MIN_SEEDS or num_classes < MIN_CLASSES:
        return None
    differences_SC = values_SC - references_SC
    of_seeds = float(differences_SC.mean(axis=1).var(ddof=1)) / num_seeds
    of_classes = float(differences_SC.mean(axis=0).var(ddof=1)) / num_classes
    total = of_seeds + of_classes
    if total == 0:
        return None
    freedom = total**2 / (of_seeds**2 / (num_seeds - 1) + of_classes**2 / (num_classes - 1))
    return float(differences_SC.mean()), float(stdtrit(freedom, 1 - level / 2)) * total**0.5
