"""`--seeds auto`: whether systems have run with enough seeds, and with how many more they should.

Enough is where half of the interval of every system's difference to the reference, paired by seed, is at most so many points. The
intervals are those that the comparison prints: all of them hold at once in 95 of 100 tables. Only that width is looked at, never whether a
difference is shown: seeds that are added until a test succeeds make it succeed by accident.
"""

from dataclasses import dataclass

from dml_core.errors import ConfigError
from dml_core.evaluation.comparing import LEVEL, Scores, differences
from dml_core.evaluation.statistics import MIN_SEEDS, half_width_of

FIRST_SEEDS = MIN_SEEDS
MOST_SEEDS = 20  # where no cap is given


@dataclass(frozen=True)
class Resolve:
    """How sure differences are to be.

    Attributes:
        points: the widest half of an interval, in per cent points.
        most: seeds that no system gets more than.
    """

    points: float = 1.0
    most: int = MOST_SEEDS


def checked_resolve(points: float | None, most: int | None) -> Resolve:
    """What was asked for, with what stands for what was not.

    Raises:
        ConfigError: a width that is not above 0, or a cap below the seeds that it begins with.
    """
    found = Resolve(1.0 if points is None else points, MOST_SEEDS if most is None else most)
    if not found.points > 0:
        raise ConfigError(f"--resolve {found.points:g}: half of an interval in points, so above 0, as in --resolve 1.0")
    if found.most < FIRST_SEEDS:
        raise ConfigError(f"--max-seeds {found.most}: --seeds auto begins with {FIRST_SEEDS} seeds; give at least as many")
    return found


@dataclass(frozen=True)
class Widest:
    """The widest half of an interval of a difference to the reference, and whose it is; `num_seeds` would bring it to the one asked for."""

    system: str
    reference: str
    half_width: float
    num_seeds: int


def widest(scores: Scores, points: float, reference: str | None = None, num_queries: int | None = None) -> Widest | None:
    """Of all systems' differences to the reference; None where nothing can be compared.

    Args:
        scores: system -> seed -> score, in per cent.
        points: asked for.
        reference: a system that was named beforehand; else the one with the highest mean, and the intervals hold for every pair.
        num_queries: of which the scores are the share found; None for other scores.
    """
    against = differences(scores, reference, 1.0, num_queries)
    num_tests = len(against) if reference in scores else len(against) * (len(against) + 1) // 2
    found = [
        Widest(pair.system, pair.other, pair.half_width, _seeds_for(pair.deviation, points, LEVEL / num_tests))
        for pair in against
        if pair.half_width is not None and pair.deviation is not None
    ]
    return max(found, key=lambda one: one.half_width, default=None)


def next_seeds(found: Widest | None, num_seeds: int, resolve: Resolve) -> int:
    """How many seeds to have next: as many as the widest interval needs, one more at least and twice as many at most, up to the cap."""
    if found is None or found.half_width <= resolve.points:
        return num_seeds
    return min(max(found.num_seeds, num_seeds + 1), 2 * num_seeds, max(resolve.most, num_seeds))


def _seeds_for(deviation: float, points: float, level: float) -> int:
    """The fewest whose interval has that half width, where the deviation stays."""
    num_seeds = MIN_SEEDS
    while half_width_of(deviation, num_seeds, level) > points and num_seeds < 10_000:
        num_seeds += 1
    return num_seeds
