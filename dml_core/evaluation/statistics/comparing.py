"""Statistical comparison of a table of systems by seeds: which may be the best, and which differ.

Systems that share at least MIN_SEEDS seeds are compared seed by seed (`statistics.paired_difference`). All comparisons use Bonferroni's
correction: each family of tests and intervals has a familywise level of 0.05.

- The set of the best (Hsu 1984, multiple comparisons with the best) contains the system with the highest true mean in 95 of 100 tables. A
  system leaves it when another one is higher by a one-sided test at 0.05 / (K - 1). The intervals of the difference to the best are
  simultaneous with it.
- Differences to a reference named beforehand: two-sided over the other systems.
- Differences of any two systems: two-sided over all pairs, so any of them may be inspected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import TypedDict

import numpy as np

from dml_core.errors import EvaluationError
from dml_core.evaluation.metric_info import metric_info
from dml_core.evaluation.statistics.naming import MOST_NAMES, leaders_named, names_of
from dml_core.evaluation.statistics.paired import (
    MIN_SEEDS,
    SAME,
    check_score,
    half_width_of,
    paired_difference,
    probabilities,
    seeds_needed,
    smallest_difference,
)

LEVEL = 0.05
POWER = 0.8
BOLD = "Bold: the 95 % confidence set of the best."  # legend of the systems of `Comparison.best_set`
Scores = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Pair:
    """Difference of two systems over their shared seeds; no figures with fewer than MIN_SEEDS shared seeds.

    Attributes:
        system, other: names; the difference is system minus other.
        seeds: shared seeds.
        difference: mean difference, in the table's unit.
        half_width: half of its confidence interval, simultaneous over the pair's family.
        deviation: standard deviation of the differences.
        p_value: uncorrected p value of the paired t test; p_adjusted: multiplied by the number of tests in the family.
        posterior: probabilities that the system is better than the other by more than a point, within a point of it, and worse.
        level: level of the interval and the test, corrected for the number of tests in the family.
    """

    system: str
    other: str
    seeds: tuple[int, ...]
    difference: float | None = None
    half_width: float | None = None
    deviation: float | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    posterior: tuple[float, float, float] | None = None
    level: float | None = None

    @property
    def is_significant(self) -> bool:
        """True if the two differ significantly by the corrected test."""
        return self.p_adjusted is not None and self.p_adjusted < LEVEL

    @property
    def reversed(self) -> "Pair":
        """The other minus the system."""
        return replace(
            self,
            system=self.other,
            other=self.system,
            difference=None if self.difference is None else -self.difference,
            posterior=None if self.posterior is None else self.posterior[::-1],
        )


@dataclass(frozen=True)
class Needed:
    """Seeds needed to detect a difference of `points` between a system and the reference; None if above `MOST_SEEDS` or unknown."""

    system: str
    seeds: int | None


@dataclass(frozen=True)
class Comparison:
    """Comparison of systems by one metric on one dataset.

    Attributes:
        dataset, metric: dataset and metric of the scores.
        means: mean of each system over its own seeds, best first.
        reference: system that the others are compared with; the best if none was named.
        is_named: True if a settings file named the reference.
        pairs: every two systems, the higher mean first; corrected over all of them.
        against: every other system minus the reference, highest mean first; corrected over these if the reference was named, else over all
            pairs.
        to_best: interval of each compared system's true mean minus the highest of the others' (Hsu); simultaneous. The lower end is None
            if the system was not compared with one that may be the best.
        smallest: smallest true difference of two systems detected with power POWER, the median over pairs; None if nothing is compared.
        points: difference used by `needed` and posteriors; None for units without points.
        needed: for every system of `against`, at the corrected level with power POWER.
        decimals: decimals of figures in the sentence.
        num_classes: number of classes scored, if known.
        sentence: the comparison in words.
    """

    dataset: str
    metric: str
    means: dict[str, float]
    reference: str
    is_named: bool
    pairs: tuple[Pair, ...]
    against: tuple[Pair, ...]
    to_best: dict[str, tuple[float | None, float]]
    smallest: float | None
    points: float | None
    needed: tuple[Needed, ...]
    decimals: int
    num_classes: int | None = None
    sentence: str = ""

    @property
    def best(self) -> str:
        """System with the highest mean; the first of equals."""
        return next(iter(self.means))

    @property
    def best_set(self) -> frozenset[str]:
        """Confidence set of the best system; empty if nothing could be compared."""
        return frozenset(system for system, (_, high) in self.to_best.items() if high > 0)

    @property
    def num_tests(self) -> int:
        """Number of pairs that share enough seeds to be tested."""
        return sum(pair.p_value is not None for pair in self.pairs)

    @property
    def limits(self) -> str | None:
        """Sentence about the smallest difference that the comparison detects; None if nothing varies."""
        if not self.smallest:
            return None
        pairs = f"median over {self.num_tests} pairs" if self.num_tests > 1 else "one pair"
        if self.points is not None and self.smallest >= 100 * self.points:
            return f"This comparison is too small to detect a difference with {100 * POWER:.0f} % power ({pairs})."
        amount = f"{self.smallest:.{self.decimals}f}" + (" points" if self.points == 1 else "")
        return f"This comparison detects differences of {amount} with {100 * POWER:.0f} % power ({pairs})."

    @property
    def heading(self) -> str:
        """Heading of the column of `difference_text`."""
        return f"difference to {self.reference} (95 %, simultaneous)" if self.is_named else "difference to the best (95 %, simultaneous)"

    def difference_text(self, system: str) -> str:
        """Return the difference to the reference, or to the best of the others, with its simultaneous interval."""
        if self.is_named:
            if system == self.reference:
                return "reference"
            pair = next((pair for pair in self.against if pair.system == system), None)
            return "not compared" if pair is None or pair.p_adjusted is None else self.said(pair)
        if system not in self.to_best:
            return "not compared"
        low, high = self.to_best[system]
        return f"at most {self.figure(high)}" if low is None else f"{self.figure(low)} to {self.figure(high)}"

    def said(self, pair: Pair) -> str:
        """Return a difference with its sign and its interval; a dash if there is none."""
        if pair.difference is None or pair.half_width is None:
            return "-"
        return f"{self.figure(pair.difference)} ± {pair.half_width:.{self.decimals}f}"

    def figure(self, difference: float) -> str:
        """Return a difference with its sign."""
        return f"{round(difference, self.decimals) + 0.0:+.{self.decimals}f}"

    @property
    def matrix(self) -> list[tuple[str, list[Pair | None]]]:
        """Each system minus each system, best first; None on the diagonal."""
        by_names = {(pair.system, pair.other): pair for one in self.pairs for pair in (one, one.reversed)}
        return [(system, [by_names.get((system, other)) for other in self.means]) for system in self.means]


class Tested(TypedDict):
    """Numbers of queries with a positive and of classes scored, if known."""

    num_queries: int | None
    num_classes: int | None


def tested_on(metrics: Mapping[str, float]) -> Tested:
    """Return the numbers of queries and classes of a run's scores, as arguments of `compare`."""
    queries, classes = metrics.get("num_queries"), metrics.get("num_query_classes")
    return {
        "num_queries": None if queries is None else int(queries - metrics.get("num_queries_without_positive", 0)),
        "num_classes": None if classes is None else int(classes),
    }


def compare(
    dataset: str,
    metric: str,
    scores: Scores,
    reference: str | None = None,
    points: float | None = 1.0,
    decimals: int = 1,
    num_queries: int | None = None,
    num_classes: int | None = None,
) -> Comparison | None:
    """Compare systems on one dataset; None for fewer than two.

    Args:
        dataset, metric: dataset and metric of the scores; higher is better.
        scores: system -> seed -> score, all in the displayed unit.
        reference: a system named beforehand; if it has no scores, there is no named one.
        points: one percentage point in that unit: 1 for per cent, 0.01 for shares; None for units without points.
        decimals: decimals of figures in the sentence.
        num_queries, num_classes: numbers of queries and classes scored, if known.

    Raises:
        EvaluationError: a score is not finite, or a number too small.
    """
    if not (points is None or points > 0) or decimals < 0:
        raise EvaluationError(f"points is {points} and decimals {decimals}; expected a number above 0 or None, and one from 0")
    means = _sorted_means(scores)
    if len(means) < 2:
        return None
    floor = num_queries if metric_info(metric).is_share_of_queries else None
    is_named = reference in means
    chosen = reference if reference in means else next(iter(means))
    pairs = _corrected([_pair(scores, *names, points, floor) for names in combinations(means, 2)])
    compared = [pair for pair in pairs if pair.deviation is not None]
    detectable = [smallest_difference(pair.deviation or 0.0, len(pair.seeds), POWER, pair.level or LEVEL) for pair in compared]
    against = _against(means, chosen, pairs, is_named)
    comparison = Comparison(
        dataset=dataset,
        metric=metric,
        means=means,
        reference=chosen,
        is_named=is_named,
        pairs=tuple(pairs),
        against=tuple(against),
        to_best=_to_best(means, compared),
        smallest=median(detectable) if detectable else None,
        points=points,
        needed=tuple(_needed(pair, points) for pair in against),
        decimals=decimals,
        num_classes=num_classes,
    )
    return replace(comparison, sentence=_sentence(comparison, scores))


def differences(scores: Scores, reference: str | None, points: float | None = None, num_queries: int | None = None) -> list[Pair]:
    """Return only `Comparison.against`: every system minus the reference, or the best if none is named, with simultaneous intervals."""
    means = _sorted_means(scores)
    if len(means) < 2:
        return []
    is_named = reference in means
    chosen = reference if reference in means else next(iter(means))
    names = [(name, chosen) for name in means if name != chosen] if is_named else combinations(means, 2)
    return _against(means, chosen, _corrected([_pair(scores, *pair, points, num_queries) for pair in names]), is_named)


def _sorted_means(scores: Scores) -> dict[str, float]:
    for name, seed, score in ((name, seed, score) for name, by_seed in scores.items() for seed, score in by_seed.items()):
        check_score(f"{name}, seed {seed}", score)
    means = {name: float(np.mean(list(by_seed.values()))) for name, by_seed in scores.items() if by_seed}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _pair(scores: Scores, system: str, other: str, points: float | None, num_queries: int | None) -> Pair:
    """Return the uncorrected difference of two systems."""
    seeds = tuple(sorted(scores[system].keys() & scores[other].keys()))
    if len(seeds) < MIN_SEEDS:
        return Pair(system, other, seeds)
    values, references = ([scores[name][seed] for seed in seeds] for name in (system, other))
    difference = paired_difference(values, references, None if points is None else num_queries, 100 * (points or 0.01))
    posterior = None if points is None else probabilities(difference, points)
    return Pair(system, other, seeds, difference.mean, difference.half_width, difference.deviation, difference.p_value, posterior=posterior)


def _corrected(pairs: Sequence[Pair]) -> list[Pair]:
    """Apply Bonferroni's correction over the pairs that were compared."""
    num_tests = sum(pair.p_value is not None for pair in pairs)
    corrected = []
    for pair in pairs:
        if pair.p_value is not None and pair.deviation is not None:
            level = LEVEL / num_tests
            half_width = half_width_of(pair.deviation, len(pair.seeds), level)
            pair = replace(pair, p_adjusted=min(1.0, num_tests * pair.p_value), half_width=half_width, level=level)
        corrected.append(pair)
    return corrected


def _against(means: Mapping[str, float], reference: str, pairs: Sequence[Pair], is_named: bool) -> list[Pair]:
    """Return every system minus the reference, corrected over these if it was named, else as in `pairs`."""
    by_system = {pair.system if pair.other == reference else pair.other: pair for pair in pairs if reference in (pair.system, pair.other)}
    differences = [pair if pair.other == reference else pair.reversed for pair in (by_system[name] for name in means if name != reference)]
    return _corrected(differences) if is_named else differences


def _to_best(means: Mapping[str, float], compared: Sequence[Pair]) -> dict[str, tuple[float | None, float]]:
    """Return Hsu's intervals of each system minus the best of the others; without a lower end if it shares no seeds with a possible best.

    All intervals hold if the bounds of the truly best system minus each other one hold. Each of these K - 1 bounds has the one-sided level
    LEVEL / (K - 1), so all hold at once with probability 1 - LEVEL.
    """
    systems = [name for name in means if any(name in (pair.system, pair.other) for pair in compared)]
    level = 2 * LEVEL / max(len(systems) - 1, 1)  # two-sided, so half of it is the one-sided level
    bounds: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in systems}
    for pair in compared:
        assert pair.difference is not None
        assert pair.deviation is not None
        half = half_width_of(pair.deviation, len(pair.seeds), level)
        if pair.deviation == 0 and pair.p_value is not None and pair.p_value >= level:
            half = abs(pair.difference) + SAME  # too few seeds to trust a spread of 0
        bounds[pair.system][pair.other] = pair.difference - half, pair.difference + half
        bounds[pair.other][pair.system] = -pair.difference - half, -pair.difference + half
    highs = {name: max(0.0, min(high for _, high in bounds[name].values())) for name in systems}
    best = [name for name in systems if highs[name] > 0] or systems
    intervals: dict[str, tuple[float | None, float]] = {}
    for name, against in bounds.items():
        rivals = [other for other in best if other != name]
        is_compared = all(other in against for other in rivals)
        intervals[name] = min((0.0, *(against[other][0] for other in rivals))) if is_compared else None, highs[name]
    return intervals


def _needed(pair: Pair, points: float | None) -> Needed:
    if points is None or not pair.deviation:
        return Needed(pair.system, None)
    return Needed(pair.system, seeds_needed(points, pair.deviation, POWER, pair.level or LEVEL))


# ---------------------------------------------------------------- in words


def _sentence(comparison: Comparison, scores: Scores) -> str:
    title = metric_info(comparison.metric).title
    highest = comparison.means[comparison.best]
    leaders = [name for name, value in comparison.means.items() if abs(value - highest) <= SAME * max(1.0, abs(value))]
    where = f" on these {comparison.num_classes} classes" if comparison.num_classes is not None else ""
    sentences = [f"Best mean {title}{where}: {leaders_named(leaders)}, {highest:.{comparison.decimals}f}."]
    if not comparison.to_best:
        return f"{sentences[0]} Nothing is compared: fewer than {MIN_SEEDS} shared seeds."
    sentences.append(_who_may_be_best(comparison))
    worse = [pair for pair in comparison.pairs if pair.system == comparison.best and pair.is_significant and (pair.difference or 0) > 0]
    sentences += [f"Significantly worse than {comparison.best}: {_worse(comparison, worse)}."] if worse else []
    if comparison.is_named and any(pair.p_adjusted is not None for pair in comparison.against):
        sentences.append(_against_reference(comparison))
    left = [name for name in comparison.means if name not in comparison.to_best]
    sentences += [f"Not compared: {names_of(left)} (fewer than {MIN_SEEDS} shared seeds)."] if left else []
    return " ".join([*sentences, _seeds(scores)])


def _who_may_be_best(comparison: Comparison) -> str:
    """Describe the confidence set of the best. It may exclude systems without a significant difference, which are worse or equal."""
    first, *others = candidates = [name for name in comparison.means if name in comparison.best_set] or [comparison.best]
    best = "best" if len(comparison.to_best) == len(comparison.means) else "best of the compared systems"
    if not others:
        return f"{first} is the {best} (95 % confidence)."
    if len(candidates) == len(comparison.to_best):
        return f"{'Either' if len(others) == 1 else f'Any of the {len(candidates)}'} may be the {best} (95 % confidence)."
    if len(others) > MOST_NAMES:
        return f"The {best} is {first} or one of {len(others)} others (95 % confidence)."
    return f"The {best} is one of {names_of(candidates, MOST_NAMES + 1)} (95 % confidence)."


def _worse(comparison: Comparison, worse: Sequence[Pair]) -> str:
    """Name the nearest system with its difference, and count the others."""
    nearest, others = worse[0], len(worse) - 1
    first = f"{nearest.other} ({comparison.said(nearest.reversed)})"
    return f"{first} and {others} other{'s' if others > 1 else ''}" if others else first


def _against_reference(comparison: Comparison) -> str:
    kinds = {"better": 0, "worse": 0, "with no significant difference": 0}
    for pair in comparison.against:
        if pair.difference is None:
            continue
        if pair.is_significant:
            kinds["better" if pair.difference > 0 else "worse"] += 1
        else:
            kinds["with no significant difference"] += 1
    return f"Compared with {comparison.reference}: {', '.join(f'{count} {kind}' for kind, count in kinds.items() if count)}."


def _seeds(scores: Scores) -> str:
    seeds = {frozenset(by_seed) for by_seed in scores.values() if by_seed}
    if len(seeds) > 1:
        return "Systems differ in their seeds; each pair is compared over those that it shares."
    return f"{len(next(iter(seeds)))} seeds."
