"""Verdicts against scipy's t-tests, by hand, and at their borders."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from tasks.tables.verdicts import judge

SCORES = st.lists(st.floats(0, 100, allow_nan=False).map(lambda value: round(value, 2)), min_size=2, max_size=6)


@given(SCORES, st.floats(0, 100).map(lambda value: round(value, 1)), st.sampled_from([0.5, 1.0, 3.0, 20.0]))
def test_it_is_two_one_sided_tests_and_a_two_sided_one(values: list[float], published: float, tolerance: float) -> None:
    if np.std(values) < 1e-9:
        return
    not_below = ttest_1samp(values, published - tolerance, alternative="greater").pvalue
    not_above = ttest_1samp(values, published + tolerance, alternative="less").pvalue
    beyond = ttest_1samp(values, published + np.sign(np.mean(values) - published) * tolerance).pvalue
    expected = "undecided"
    if max(not_below, not_above) <= 0.05:
        expected = "equal"
    elif abs(np.mean(values) - published) > tolerance and beyond < 0.05:
        expected = "above" if np.mean(values) > published else "below"
    assert judge(values, published, tolerance).judgement == expected


def test_one_seed_decides_nothing() -> None:
    verdict = judge([60.1], 60.1, 1.0)
    assert (verdict.judgement, verdict.half_width, str(verdict)) == ("undecided", None, "undecided (one seed)")


def test_by_hand() -> None:
    """Three seeds of standard deviation 1: half a 95 % interval is 4.303 / sqrt(3) = 2.484, half a 90 % one 2.920 / sqrt(3) = 1.686."""
    values = [59.0, 60.0, 61.0]
    assert judge(values, 60.0, 1.7).judgement == "equal"
    assert judge(values, 60.0, 1.6).judgement == "undecided"
    assert judge(values, 56.5, 1.0).judgement == "above"
    assert judge(values, 63.5, 1.0).judgement == "below"
    assert judge(values, 57.0, 1.0).judgement == "undecided"
    assert judge(values, 60.0, 1.6).half_width == pytest.approx(2.484, abs=1e-3)


def test_the_seeds_that_would_decide_do_and_one_fewer_do_not() -> None:
    """As many values of the same mean and standard deviation (with n - 1) are made, and judged."""
    for published in (60.0, 60.5, 57.0):
        asked = judge([59.0, 60.0, 61.0], published, 1.0)
        assert asked.seeds_to_decide is not None
        for num_seeds, decided in ((asked.seeds_to_decide, True), (asked.seeds_to_decide - 1, False)):
            spread = np.linspace(-1, 1, num_seeds)
            values = 60 + spread / np.std(spread, ddof=1)
            assert (judge(values.tolist(), published, 1.0).judgement != "undecided") == decided


def test_a_mean_on_the_border_is_never_decided() -> None:
    verdict = judge([59.0, 60.0, 61.0], 61.0, 1.0)
    assert verdict.seeds_to_decide is None
    assert str(verdict) == "undecided (more than 1000 seeds would tell)"


def test_runs_that_agree_to_the_digit_are_equal_within_any_tolerance() -> None:
    assert judge([60.0, 60.0], 60.0, 0.1).judgement == "equal"
    assert judge([60.0, 60.0], 59.0, 0.1).judgement == "above"
