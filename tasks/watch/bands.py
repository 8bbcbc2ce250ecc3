"""Convergence bands: limits within which one new run is expected, from the scores of accepted runs with other seeds.

MLPerf's reference convergence points (mlcommons/logging, rcp_checker) compare the mean of several submitted runs with at least twice as
many reference runs, without the fastest and the slowest. Here one new run is compared with n accepted ones by a prediction limit for one
more normal observation, mean +- t * s * sqrt(1 + 1/n) with Student's t of n - 1 degrees (Hahn 1969), on both sides: a score that is too
good is a fault as well. Extremes are not dropped: a t limit needs the whole spread, and without them false alarms are several times as
many (tests/tasks/watch/test_bands.py simulates both).

Judged are Recall@K at the smallest K, MAP@R, NMI, the mean loss of the first and of the last epoch, and the number of epochs to a target
score. The level is Bonferroni's, over all accepted rows, scores, sides and the nights of a month; a receipt is verified once.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from scipy import stats

from dml_core.evaluation.metric_info import metric_info
from tasks.watch.records import Band, Evidence, Reference

ALARMS_PER_MONTH = 0.1  # expected false alarms of nightly runs if scores are normal; below 1 if they are Student-t of 8 degrees
NIGHTS_PER_MONTH = 30
SCORES = ("map@r", "nmi")  # judged besides the first Recall@K, of those that a run has
NOT_METRICS = EPOCHS, FIRST_LOSS, LAST_LOSS = "epochs to target", "loss of the first epoch", "loss of the last epoch"
MOST_JUDGED = 6
WIDEST = 9.0  # standard deviations; a wider band would accept almost any run
RELATIVE_FLOOR = 1e-6  # of the mean: deviation of scores that are equal in all accepted runs


def shared_level(references: Iterable[Reference], rows: Iterable[str] = (), num_nights: int = NIGHTS_PER_MONTH) -> float:
    """Return the probability with which one limit of one score may be exceeded by chance: all bands share a month's false alarms.

    There are bands of all accepted rows and of `rows`, about to be accepted, each verified every night.
    """
    num_rows = len({one.row for reference in references for one in reference.evidence}.union(rows))
    return ALARMS_PER_MONTH / (max(1, num_rows) * MOST_JUDGED * num_nights * 2)


def width_of(num_seeds: int, level: float) -> float:
    """Return the distance of a limit from the mean of `num_seeds` accepted scores, in their standard deviations; infinite below two."""
    if num_seeds < 2:
        return math.inf
    return float(stats.t.isf(level, num_seeds - 1)) * math.sqrt(1 + 1 / num_seeds)


def seeds_needed(level: float) -> int:
    """Return the fewest accepted seeds whose band is not wider than `WIDEST`."""
    return next(num_seeds for num_seeds in range(2, 1000) if width_of(num_seeds, level) <= WIDEST)


def prediction_band(values: Sequence[float], level: float, floor: float = 0.0) -> Band:
    """Return the limits that one more value than those of the accepted runs, at least two, exceeds with probability `level` on each side.

    `floor` is the least standard deviation, for scores that have only some values.
    """
    mean = float(np.mean(values))
    deviation = max(float(np.std(values, ddof=1)), floor, RELATIVE_FLOOR * abs(mean))
    half = width_of(len(values), level) * deviation
    return Band(low=mean - half, high=mean + half)


def bands_of(accepted: Sequence[Evidence], level: float) -> dict[str, Band]:
    """Return the band of each judged score of a row at a level (`shared_level`); empty if its accepted runs, one per seed, are too few."""
    if len(accepted) < seeds_needed(level):
        return {}
    target = _target(accepted, level)
    values = [judged(evidence, target) for evidence in accepted]
    names = [name for name in values[0] if all(name in other for other in values)]
    floors = {name: _floor(name, accepted[0]) for name in names}
    return {name: prediction_band([of_run[name] for of_run in values], level, floors[name]) for name in names}


def judge(evidence: Evidence, accepted: Sequence[Evidence], level: float) -> tuple[dict[str, Band], str | None]:
    """Return the bands of a row (`bands_of`) and the first score of a new run that is outside its band, in words; None if all are within.

    A score that only the accepted runs have is outside.
    """
    bands = bands_of(accepted, level)
    values = judged(evidence, _target(accepted, level)) if bands else {}
    for name, band in bands.items():
        value, title = values.get(name), name if name in NOT_METRICS else metric_info(name).title
        if value is None:
            return bands, f"{title} is missing"
        if not band.low <= value <= band.high:
            side = "above" if value > band.high else "below"
            return bands, f"{title} {_shown(name, value)} is {side} the band {_shown(name, band.low)} to {_shown(name, band.high)}"
    return bands, None


def judged(evidence: Evidence, target: float | None) -> dict[str, float]:
    """Return the judged scores of a run; `target` is the Recall@1 to which epochs are counted, None if there is none."""
    values = {name: evidence.scores[name] for name in (evidence.first_recall, *SCORES) if name in evidence.scores}
    if evidence.losses and evidence.steps_per_epoch:
        values[FIRST_LOSS] = float(np.mean(evidence.losses[: evidence.steps_per_epoch]))
        values[LAST_LOSS] = float(np.mean(evidence.losses[-evidence.steps_per_epoch :]))
    if target is not None and evidence.curve:
        values[EPOCHS] = epochs_to(evidence.curve, evidence.curve_epochs, target)
    return values


def epochs_to(curve: Sequence[float], epochs: Sequence[int], target: float) -> float:
    """Return after how many epochs a curve first reaches a target, linear between its points; infinite if it does not.

    >>> epochs_to([0.2, 0.4, 0.3], [8, 16, 24], 0.3)
    12.0
    """
    if curve[0] >= target:
        return float(epochs[0])
    for (before, at), (after, then) in pairwise(zip(curve, epochs, strict=True)):
        if after >= target:
            return at + (then - at) * (target - before) / (after - before)
    return math.inf


def _target(accepted: Sequence[Evidence], level: float) -> float | None:
    """Return the target of the epochs: a score that every accepted run reached, and a new one does with probability 1 - level."""
    if len(accepted) < 2 or not all(evidence.curve for evidence in accepted):
        return None
    best = [max(evidence.curve) for evidence in accepted]
    return min(prediction_band(best, level).low, *best)


def _floor(name: str, evidence: Evidence) -> float:
    """Return the least deviation of a score: one query of a share of the queries, half of the distance between points of a curve."""
    if name == EPOCHS:
        points = evidence.curve_epochs
        return (points[-1] - points[0]) / max(1, len(points) - 1) / 2 or 0.5
    if name in (FIRST_LOSS, LAST_LOSS) or not metric_info(name).is_share_of_queries:
        return 0.0
    return 1 / max(1.0, evidence.scores.get("num_queries", 1.0))


def _shown(name: str, value: float) -> str:
    """Return a score or a limit with so many digits that the two look different, scores in per cent."""
    return f"{value if name in NOT_METRICS else 100 * value:.5g}"
