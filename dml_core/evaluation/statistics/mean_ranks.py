"""Mean ranks of systems over several datasets: Friedman's test and Nemenyi's critical difference (Demsar, JMLR 2006).

Scores of different datasets have different scales, ranks do not. A block is a dataset with the means over the seeds that all systems have
of it: pairs of dataset and seed are not independent blocks, because a dataset's seeds share its peculiarities. For a single dataset the
blocks are the seeds, and the result holds only for seeds of that dataset. Two seeds may agree by chance, so it needs MIN_SEEDS.

Shapes: K systems, B blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dml_core.evaluation.metric_info import metric_info
from dml_core.evaluation.statistics.comparing import LEVEL, Scores
from dml_core.evaluation.statistics.naming import leaders_named
from dml_core.evaluation.statistics.paired import MIN_SEEDS

MIN_SYSTEMS = 3
DECIMALS = 10  # means of the same values in another order differ after more


@dataclass(frozen=True)
class Ranking:
    """Mean ranks of systems.

    Attributes:
        metric: metric of the scores.
        over: kind of the blocks.
        blocks: names of the blocks.
        mean_ranks: mean rank of each system, the best (1) first.
        p_value: p value of Friedman's test that all systems are equal.
        critical_difference: larger differences of mean ranks are significant at the 0.05 level (Nemenyi).
        groups: systems within one critical difference of each other, the largest such groups.
        sentence: the ranking in words.
    """

    metric: str
    over: Literal["datasets", "seeds"]
    blocks: tuple[str, ...]
    mean_ranks: dict[str, float]
    p_value: float
    critical_difference: float
    groups: tuple[tuple[str, ...], ...]
    sentence: str


def rank_systems(metric: str, scores: Mapping[str, Scores]) -> Ranking | None:
    """Rank the systems that every dataset has, or that have MIN_SEEDS seeds of the only one; None without enough systems or blocks.

    Of several datasets, those with fewer than MIN_SYSTEMS systems are left out, and two must remain.

    Args:
        metric: metric of the scores; higher is better.
        scores: dataset -> system -> seed -> score.
    """
    over: Literal["datasets", "seeds"] = "datasets" if len(scores) > 1 else "seeds"
    least, least_blocks = (1, 2) if over == "datasets" else (MIN_SEEDS, MIN_SEEDS)
    used = {dataset: of for dataset, of in scores.items() if sum(len(by_seed) >= least for by_seed in of.values()) >= MIN_SYSTEMS}
    systems = [name for name in next(iter(used.values()), {}) if all(len(of.get(name, ())) >= least for of in used.values())]
    blocks = _datasets(used, systems) if over == "datasets" else _seeds(next(iter(used.values()), {}), systems)
    if len(systems) < MIN_SYSTEMS or len(blocks) < least_blocks:
        return None
    ranks_K, p_value, critical_difference = compare_ranks(np.array(list(blocks.values())))
    mean_ranks = dict(sorted(zip(systems, ranks_K.tolist(), strict=True), key=lambda item: item[1]))
    return Ranking(
        metric=metric,
        over=over,
        blocks=tuple(blocks),
        mean_ranks=mean_ranks,
        p_value=p_value,
        critical_difference=critical_difference,
        groups=alike(mean_ranks, critical_difference),
        sentence=_sentence(metric, over, len(blocks), mean_ranks, p_value, critical_difference),
    )


def compare_ranks(scores_BK: NDArray[np.float64]) -> tuple[NDArray[np.float64], float, float]:
    """Rank three or more systems in each of two or more blocks, highest score first; equal systems share their ranks.

    Returns:
        Mean ranks (K,), the p value of Friedman's test (chi-squared, corrected for ties), and Nemenyi's critical difference at the 0.05
        level.
    """
    from scipy.stats import friedmanchisquare, rankdata  # takes a second to import

    num_blocks, num_systems = scores_BK.shape
    scores_BK = scores_BK.round(DECIMALS)
    ranks_BK = rankdata(-scores_BK, axis=1)
    alike_everywhere = bool((ranks_BK == ranks_BK[:, :1]).all())
    p_value = 1.0 if alike_everywhere else float(friedmanchisquare(*scores_BK.T).pvalue)
    critical_difference = _nemenyi_quantile(num_systems) * (num_systems * (num_systems + 1) / (6 * num_blocks)) ** 0.5
    return ranks_BK.mean(axis=0), p_value, critical_difference


@cache
def _nemenyi_quantile(num_systems: int) -> float:
    """Return the 0.95 quantile of the studentized range divided by the root of 2 (Demsar, table 5)."""
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(0.95, num_systems, np.inf)) / 2**0.5


def alike(mean_ranks: Mapping[str, float], critical_difference: float) -> tuple[tuple[str, ...], ...]:
    """Return the largest groups of two or more systems within one critical difference of their ascending mean ranks, the best first."""
    names, ranks = list(mean_ranks), list(mean_ranks.values())
    groups: list[tuple[str, ...]] = []
    last_end = 0
    for start in range(len(names)):
        end = max(index for index in range(start, len(names)) if ranks[index] - ranks[start] <= critical_difference) + 1
        if end > last_end and end - start > 1:
            groups.append(tuple(names[start:end]))
        last_end = max(last_end, end)
    return tuple(groups)


def _datasets(scores: Mapping[str, Scores], systems: list[str]) -> dict[str, list[float]]:
    """Return dataset -> mean over the seeds that all systems have of each; none without such a seed."""
    seeds = {dataset: list(_seeds(of, systems).values()) for dataset, of in scores.items()}
    return {dataset: np.mean(rows, axis=0).tolist() for dataset, rows in seeds.items() if rows}


def _seeds(scores: Scores, systems: list[str]) -> dict[str, list[float]]:
    """Return seed -> score of each system, for the seeds that all have."""
    shared = set.intersection(*(set(scores[name]) for name in systems)) if systems else set()
    return {f"seed {seed}": [scores[name][seed] for name in systems] for seed in sorted(shared)}


def _sentence(metric: str, over: str, num_blocks: int, mean_ranks: Mapping[str, float], p_value: float, critical_difference: float) -> str:
    best = min(mean_ranks.values())
    leaders = [name for name, rank in mean_ranks.items() if rank - best < 10**-DECIMALS]
    where = f"{num_blocks} {over}" + (" of one dataset" if over == "seeds" else "")
    led_by = f"{leaders_named(leaders)} {'is' if len(leaders) == 1 else 'are'} first" if len(leaders) < len(mean_ranks) else "all are equal"
    ranked = f"By ranks of {metric_info(metric).title} over {where}, {led_by} (mean rank {best:.2g})"
    if p_value >= LEVEL:
        return f"{ranked}; Friedman's test finds no significant difference (p = {p_value:.2g})."
    behind, num_others = sum(rank - best > critical_difference for rank in mean_ranks.values()), len(mean_ranks) - len(leaders)
    lie = f"{behind} of the other {num_others} lie" if num_others > 1 else f"the other {'lies' if behind else 'does not lie'}"
    nemenyi = (
        f"{lie} more than the critical difference, {critical_difference:.2g}, behind {'it' if len(leaders) == 1 else 'them'} (Nemenyi)"
    )
    return f"{ranked}; systems differ (Friedman, p = {p_value:.2g}), and {nemenyi}."
