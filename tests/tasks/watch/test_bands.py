"""Convergence bands against simulated nights and values worked out by hand."""

import numpy as np
import pytest

from tasks.watch.bands import EPOCHS, NIGHTS_PER_MONTH, bands_of, epochs_to, judge, prediction_band, seeds_needed, shared_level, width_of
from tests.tasks.watch.conftest import evidence

NIGHTS, ROWS, SEEDS = 10_000, 8, 11


def test_a_band_of_ten_scores_is_the_textbook_s_prediction_interval() -> None:
    # mean 4.5, s = sqrt(82.5 / 9); t(0.975, 9) = 2.262157 (Student's table)
    band = prediction_band(range(10), 0.025)
    half = 2.262157 * (82.5 / 9) ** 0.5 * 1.1**0.5
    assert (band.low, band.high) == (pytest.approx(4.5 - half, rel=1e-5), pytest.approx(4.5 + half, rel=1e-5))


def level_of(num_rows: int) -> float:
    return shared_level((), map(str, range(num_rows)))


def alarms_per_month(scores: np.ndarray) -> float:
    """Return false alarms a month of one score of ROWS rows: the last column is a night's run, the others its accepted seeds."""
    level = level_of(ROWS)
    accepted, new = scores[:, :-1], scores[:, -1]
    width = width_of(accepted.shape[1], level) * accepted.std(axis=1, ddof=1)
    return float((abs(new - accepted.mean(axis=1)) > width).mean()) * ROWS * 6 * NIGHTS_PER_MONTH


@pytest.mark.parametrize(("kind", "most"), [("normal", 0.2), ("discrete", 0.2), ("heavy", 1.0)])
def test_false_alarms_stay_below_one_a_month(kind: str, most: float) -> None:
    rng, shape = np.random.default_rng(0), (50 * NIGHTS, SEEDS + 1)
    if kind == "normal":
        scores = rng.normal(size=shape)
    elif kind == "heavy":
        scores = rng.standard_t(8, size=shape)
    else:
        scores = rng.binomial(200, 0.6, size=shape) / 200
    assert alarms_per_month(scores) < most


def test_dropping_extremes_would_raise_false_alarms() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(50 * NIGHTS, SEEDS + 1))
    kept = np.concatenate([np.sort(scores[:, :-1], axis=1)[:, 1:-1], scores[:, -1:]], axis=1)
    assert alarms_per_month(kept) > 3 * max(alarms_per_month(scores), 0.1)


def test_the_band_of_the_epochs_is_finite_although_one_of_many_accepted_runs_collapsed() -> None:
    rng = np.random.default_rng(0)
    curves = [(0.1, 0.5 + float(rng.normal(0, 0.01))) for _ in range(30)]
    curves[7] = (0.01, 0.02)
    accepted = [evidence("own/good", seed, curve=curve, curve_epochs=(1, 2)) for seed, curve in enumerate(curves)]
    band = bands_of(accepted, level_of(ROWS))[EPOCHS]
    assert (band.low, band.high) == (pytest.approx(-1.32, abs=0.01), pytest.approx(3.39, abs=0.01))
    for curve, outside in (((0.1, 0.49), None), ((0.01, 0.015), "epochs to target inf is above the band -1.3236 to 3.3903")):
        assert judge(evidence("own/good", 30, curve=curve, curve_epochs=(1, 2)), accepted, level_of(ROWS))[1] == outside


def test_a_score_that_is_just_outside_does_not_look_like_the_limit() -> None:
    accepted = [evidence("own/good", seed, scores={"map@r": 0.87 + 0.0001 * (seed % 3)}) for seed in range(10)]
    high = bands_of(accepted, level_of(ROWS))["map@r"].high
    outside = judge(evidence("own/good", 10, scores={"map@r": high + 1e-4}), accepted, level_of(ROWS))[1]
    assert outside is not None
    assert outside.startswith("MAP@R ")
    value, *_, limit = outside.removeprefix("MAP@R ").split()
    assert float(value) > float(limit) > 87


def test_more_rows_need_more_seeds_for_their_bands() -> None:
    assert [seeds_needed(level_of(num_rows)) for num_rows in (8, 12, 24)] == [8, 9, 10]


def test_few_seeds_have_no_band_and_epochs_are_interpolated() -> None:
    assert width_of(SEEDS, level_of(ROWS)) == pytest.approx(6.8, abs=0.05)
    assert 3 < seeds_needed(level_of(ROWS)) <= SEEDS
    assert epochs_to([0.2, 0.4, 0.3], [8, 16, 24], 0.3) == pytest.approx(12.0)
    assert epochs_to([0.2, 0.25], [8, 16], 0.3) == float("inf")
