"""A table of systems by seeds, read as a whole: which are better than which, and what cannot be told.

Systems that share seeds are compared seed by seed (`statistics.paired_difference`). A pair is *told* apart where its p value, corrected
by Holm for all pairs of the table, is below LEVEL: a table of equal systems tells any of its pairs apart with that chance at most. The
best system is chosen by the very data that are tested, so what is said of it rests on that correction over all pairs too; only a reference
that was named beforehand is corrected for the comparisons with it alone.

Intervals are those of single differences, 95 % each, and not corrected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

import numpy as np

from dml_core.evaluation.columns import recall_k
from dml_core.evaluation.statistics import SAME, holm, paired_difference, seeds_needed, smallest_difference

LEVEL = 0.05
POWER = 0.8
MOST_NAMES = 3  # that a sentence lists; more are counted
HIGHER_IS_BETTER = ("precision@1", "map@r", "r_precision", "mrr", "nmi", "nmi_geometric", "ami", "f1")
Scores = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Pair:
    """One system less another, over the seeds that both have; of fewer than two shared seeds there are no figures.

    Attributes:
        system, other: names.
        seeds: those that both have.
        difference, half_width: mean, and half of its own 95 % interval, in the table's unit.
        deviation: standard deviation of the differences.
        p_value: of the paired t test, as it is; p_holm: corrected within the family that the pair is in.
    """

    system: str
    other: str
    seeds: tuple[int, ...]
    difference: float | None = None
    half_width: float | None = None
    deviation: float | None = None
    p_value: float | None = None
    p_holm: float | None = None

    @property
    def is_told(self) -> bool:
        """Whether the two are told apart."""
        return self.p_holm is not None and self.p_holm < LEVEL

    @property
    def reversed(self) -> "Pair":
        """The other less the system."""
        return replace(self, system=self.other, other=self.system, difference=None if self.difference is None else -self.difference)


@dataclass(frozen=True)
class Needed:
    """How many seeds would show a difference of `points` between a system and the reference; None where it is thousands, or not known."""

    system: str
    seeds: int | None


@dataclass(frozen=True)
class Comparison:
    """Systems by one metric on one dataset.

    Attributes:
        dataset, metric: of the scores.
        means: of each system over its own seeds, the best first.
        reference: the system that the others are compared with; the best where none was named.
        is_named: whether it was, before there were scores.
        pairs: every two systems, the higher mean first; Holm over all of them.
        against: every other system less the reference, the highest mean first; Holm over these where it was named, else over all pairs.
        not_told: systems that are not shown to be worse than the best.
        smallest: the smallest true difference that the table shows with a chance of POWER at Holm's first step, the median over pairs;
            None where nothing is compared.
        points: the difference that `needed` is about; None in units where there is no such thing.
        needed: for every system of `against`, at Holm's first step and a chance of POWER.
        decimals: of figures in words.
        sentence: all of it in words.
    """

    dataset: str
    metric: str
    means: dict[str, float]
    reference: str
    is_named: bool
    pairs: tuple[Pair, ...]
    against: tuple[Pair, ...]
    not_told: tuple[str, ...]
    smallest: float | None
    points: float | None
    needed: tuple[Needed, ...]
    decimals: int
    sentence: str

    @property
    def best(self) -> str:
        """The system with the highest mean; of equals the first."""
        return next(iter(self.means))

    @property
    def in_bold(self) -> frozenset[str]:
        """The best and all that cannot be told from it; none where nothing could be compared."""
        return frozenset((self.best, *self.not_told)) if any(pair.p_holm is not None for pair in self.pairs) else frozenset()

    @property
    def limits(self) -> str | None:
        """What the table could have shown, in a sentence."""
        if self.smallest is None:
            return None
        pairs = f"{len(self.pairs)} pairs" if len(self.pairs) > 1 else "one pair"
        title = metric_title(self.metric)
        return f"A difference of {self.smallest:.{self.decimals}f} {title} would be told with a chance of {POWER:g} (Holm over {pairs})."

    @property
    def heading(self) -> str:
        """Of what `beside` says of each system."""
        return f"difference to {self.reference if self.is_named else 'the best'} (Holm)"

    def beside(self, system: str) -> str:
        """A system less the reference, with the corrected p value, as a table has room for it."""
        if system == self.reference:
            return "reference" if self.is_named else "the best"
        found = next((pair for pair in self.against if pair.system == system), None)
        if found is None or found.p_holm is None:
            return "not compared"
        return f"{self.said(found)}, p {'< 0.001' if found.p_holm < 0.001 else f'{found.p_holm:.3f}'}"

    def said(self, pair: Pair) -> str:
        """A difference with its sign and its interval; a dash where there is none."""
        if pair.difference is None or pair.half_width is None:
            return "-"
        return f"{round(pair.difference, self.decimals) + 0.0:+.{self.decimals}f} ± {pair.half_width:.{self.decimals}f}"

    @property
    def matrix(self) -> list[tuple[str, list[Pair | None]]]:
        """Each system less each system, the best first; None for itself."""
        return [(system, [None if system == other else self.pair(system, other) for other in self.means]) for system in self.means]

    def pair(self, system: str, other: str) -> Pair:
        """The system less the other, from `pairs`."""
        found = next(pair for pair in self.pairs if {pair.system, pair.other} == {system, other})
        return found if found.system == system else found.reversed


def has_best(metric: str) -> bool:
    """Whether more of a metric is better, so that there is a best system by it."""
    return recall_k(metric) is not None or metric in HIGHER_IS_BETTER


def metric_title(metric: str) -> str:
    """A metric as a sentence calls it."""
    k = recall_k(metric)
    return f"R@{k}" if k is not None else metric.upper() if metric in ("map@r", "mrr", "nmi", "ami", "f1") else metric.replace("_", " ")


def compare(
    dataset: str, metric: str, scores: Scores, reference: str | None = None, points: float | None = 1.0, decimals: int = 1
) -> Comparison | None:
    """Compare systems on one dataset; None for fewer than two.

    Args:
        dataset, metric: of the scores; more of the metric is better.
        scores: system -> seed -> score, all in the unit that is shown (per cent).
        reference: a system that was named before there were scores.
        points: the difference that numbers of seeds are asked for.
        decimals: of figures in words.
    """
    systems = [name for name, by_seed in scores.items() if by_seed]
    if len(systems) < 2:
        return None
    means = {name: float(np.mean(list(scores[name].values()))) for name in systems}
    means = dict(sorted(means.items(), key=lambda item: -item[1]))
    is_named = reference in means
    chosen = reference if reference is not None and is_named else next(iter(means))
    pairs = _corrected([_pair(scores, *names) for names in combinations(means, 2)])
    others = [name for name in means if name != chosen]
    if is_named:
        against = _corrected([_pair(scores, name, chosen) for name in others])
    else:
        by_names = {(pair.system, pair.other): pair.reversed for pair in pairs}
        against = [by_names[chosen, name] for name in others]
    compared = [pair for pair in pairs if pair.deviation is not None]
    found = Comparison(
        dataset=dataset,
        metric=metric,
        means=means,
        reference=chosen,
        is_named=is_named,
        pairs=tuple(pairs),
        against=tuple(against),
        not_told=tuple(pair.other for pair in _with_best(means, pairs) if pair.p_holm is not None and not _is_worse(pair)),
        smallest=median(_smallest(pair, len(compared)) for pair in compared) if compared else None,
        points=points,
        needed=tuple(_needed(pair, points, len(against if is_named else compared)) for pair in against),
        decimals=decimals,
        sentence="",
    )
    return replace(found, sentence=_sentence(found, scores))


def _pair(scores: Scores, system: str, other: str) -> Pair:
    """Not corrected yet."""
    seeds = tuple(sorted(scores[system].keys() & scores[other].keys()))
    if len(seeds) < 2:
        return Pair(system, other, seeds)
    found = paired_difference([scores[system][seed] for seed in seeds], [scores[other][seed] for seed in seeds])
    return Pair(system, other, seeds, found.mean, found.half_width, found.deviation, found.p_value)


def _corrected(pairs: Sequence[Pair]) -> list[Pair]:
    """With Holm's correction over those that were compared."""
    adjusted = iter(holm([pair.p_value for pair in pairs if pair.p_value is not None]))
    return [pair if pair.p_value is None else replace(pair, p_holm=next(adjusted)) for pair in pairs]


def _with_best(means: Mapping[str, float], pairs: Sequence[Pair]) -> list[Pair]:
    """The best less every other system, the highest mean first."""
    return [pair for pair in pairs if pair.system == next(iter(means))]


def _is_worse(pair: Pair) -> bool:
    """Whether the other is shown to be worse than the system."""
    return pair.is_told and pair.difference is not None and pair.difference > 0


def _smallest(pair: Pair, num_comparisons: int) -> float:
    return smallest_difference(pair.deviation or 0.0, len(pair.seeds), POWER, LEVEL / num_comparisons)


def _needed(pair: Pair, points: float | None, num_comparisons: int) -> Needed:
    if points is None or not pair.deviation:
        return Needed(pair.system, None)
    return Needed(pair.system, seeds_needed(points, pair.deviation, POWER, LEVEL / max(num_comparisons, 1)))


# ---------------------------------------------------------------- in words


def _sentence(found: Comparison, scores: Scores) -> str:
    best, title = found.best, metric_title(found.metric)
    mean = f"{title} {found.means[best]:.{found.decimals}f}"
    with_best = _with_best(found.means, found.pairs)
    compared = [pair for pair in with_best if pair.p_holm is not None]
    if not compared:
        if all(len(by_seed) == 1 for by_seed in scores.values()):
            return f"{best} is highest ({mean}), but one seed decides nothing."
        return f"{best} is highest ({mean}), but nothing is compared with it: no other system shares two seeds with it."
    told = [pair for pair in compared if _is_worse(pair)]
    parts = _what_is_told(found, told) if told else [_what_is_not_told(found, compared, mean)]
    if found.is_named and any(pair.p_holm is not None for pair in found.against):
        parts.append(_against_reference(found))
    left = [pair.other for pair in with_best if pair.p_holm is None]
    if left:
        parts.append(f"{_names(left)} {_are(left)} not compared: fewer than two seeds shared with {best}")
    if len({frozenset(by_seed) for by_seed in scores.values() if by_seed}) > 1:
        parts.append("systems differ in their seeds, and each pair is compared over those that it shares")
    return "; ".join(parts) + "."


def _what_is_told(found: Comparison, told: Sequence[Pair]) -> list[str]:
    nearest, others = told[0], len(told) - 1
    lead = f"{found.best} is better than {nearest.other} by {_difference(found, nearest)} {metric_title(found.metric)} {_over(nearest)}"
    if found.not_told:
        return [lead, f"{_names(found.not_told)} cannot be told from {found.best}"]
    return [f"{lead}, and than {'the other' if others == 1 else f'each of the other {others}'}" if others else lead]


def _what_is_not_told(found: Comparison, compared: Sequence[Pair], mean: str) -> str:
    best, first = found.best, compared[0]
    leaders = [name for name, value in found.means.items() if abs(value - found.means[best]) <= SAME * max(1.0, abs(value))]
    if len(leaders) > 1:
        shared = f"{_names(leaders, len(leaders))} share the highest mean ({mean}) {_over(first)}"
        return shared if len(leaders) == len(found.means) else f"{shared}, and nothing can be told from {best}"
    if len(found.means) == 2:
        apart = f"the first has {_difference(found, first)} {metric_title(found.metric)} more"
        return f"{best} and {first.other} cannot be told apart: {apart} {_over(first)}"
    others = f"none of the other {len(compared)}" if len(compared) > 1 else first.other
    return f"{best} is highest ({mean}), and {others} can{'' if len(compared) > 1 else 'not'} be told from it {_over(first)}"


def _against_reference(found: Comparison) -> str:
    kinds: dict[str, list[str]] = {"higher": [], "lower": [], "not told": []}
    for pair in found.against:
        if pair.difference is not None:
            kinds["not told" if not pair.is_told else "higher" if pair.difference > 0 else "lower"].append(pair.system)
    said = [f"{kind}: {_names(names)}" for kind, names in kinds.items() if names]
    return f"against the reference {found.reference}, {', '.join(said)}"


def _difference(found: Comparison, pair: Pair) -> str:
    return f"{pair.difference or 0.0:.{found.decimals}f} ± {pair.half_width or 0.0:.{found.decimals}f}"


def _over(pair: Pair) -> str:
    return f"over {len(pair.seeds)} seeds"


def _names(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Names in a row, or how many there are."""
    if len(names) > most:
        return f"{len(names)} others"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
