"""`--seeds auto`: whether systems have run with enough seeds, and how many more they need.

Seeds are enough if the interval of every system's difference to the reference, paired by seed, has at most the requested half-width. The
intervals are those of a comparison of the requested systems: all of them hold simultaneously in 95 of 100 tables. A page that shows further
lines corrects for more differences, so its intervals are wider; these lines get no seeds here, and might never be precise enough. Only the
width is checked, never whether a difference is significant: adding seeds until a test succeeds makes it succeed by chance.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dml_core.errors import ConfigError

if TYPE_CHECKING:
    from dml_core.evaluation.statistics.comparing import Scores

FIRST_SEEDS = 3  # the fewest that are compared: `MIN_SEEDS` of the statistics, which load SciPy, and every command reads options with this
MOST_SEEDS = 20  # default cap
DEFAULT_POINTS = 1.0


@dataclass(frozen=True)
class Resolve:
    """Requested precision of differences.

    Attributes:
        points: largest half-width of an interval, in percentage points.
        most: largest number of seeds of a system.

    Raises:
        ConfigError: the width is not above 0, or the cap is below the number of seeds to begin with.
    """

    points: float = DEFAULT_POINTS
    most: int = MOST_SEEDS

    def __post_init__(self) -> None:
        if not self.points > 0:
            raise ConfigError(f"--resolve {self.points:g}: half of an interval in points must be above 0, for example --resolve 1.0")
        if self.most < FIRST_SEEDS:
            raise ConfigError(f"--max-seeds {self.most}: must be at least {FIRST_SEEDS}, the number of seeds that --seeds auto starts with")


@dataclass(frozen=True)
class Widest:
    """Widest half-width of a difference to the reference, with its system; `num_seeds` would reduce it to the requested width."""

    system: str
    reference: str
    half_width: float
    num_seeds: int


def widest(scores: "Scores", points: float, reference: str | None = None, num_queries: int | None = None) -> Widest | None:
    """Return the widest of all systems' differences to the reference; None if nothing can be compared.

    Args:
        scores: system -> seed -> score, in per cent.
        points: requested half-width.
        reference: a system named beforehand; by default the one with the highest mean, and the intervals hold for every pair.
        num_queries: number of queries of which the scores are the share found; None for other scores.
    """
    from dml_core.evaluation.statistics.comparing import differences

    against = differences(scores, reference, 1.0, num_queries)
    widths = [
        Widest(pair.system, pair.other, pair.half_width, _seeds_for(pair.deviation, points, pair.level))
        for pair in against
        if pair.half_width is not None and pair.deviation is not None and pair.level is not None
    ]
    return max(widths, key=lambda width: width.half_width, default=None)


def next_seeds(interval: Widest | None, num_seeds: int, resolve: Resolve) -> int:
    """Return the next number of seeds: what the widest interval needs, at least one more, at most twice as many, up to the cap."""
    if interval is None or interval.half_width <= resolve.points:
        return num_seeds
    return min(max(interval.num_seeds, num_seeds + 1), 2 * num_seeds, max(resolve.most, num_seeds))


def _seeds_for(deviation: float, points: float, level: float) -> int:
    """Return the fewest seeds whose interval has that half-width, if the deviation stays the same."""
    from dml_core.evaluation.statistics.paired import half_width_of

    num_seeds = FIRST_SEEDS
    while half_width_of(deviation, num_seeds, level) > points and num_seeds < 10_000:
        num_seeds += 1
    return num_seeds
