"""Verdicts compared with scipy's intervals and by hand, and their error rate if the paper's figure is one run of the same system."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import ttest_1samp

from tasks.tables.judging import fewest_for_equality, judge

SCORES = st.lists(st.floats(0, 100, allow_nan=False).map(lambda value: round(value, 2)), min_size=3, max_size=6)


@given(SCORES, st.floats(0, 100).map(lambda value: round(value, 1)), st.sampled_from([0.5, 1.0, 3.0, 20.0]))
def test_it_is_the_t_test_of_one_more_run_and_two_one_sided_tests_of_the_mean(
    values: list[float], published: float, tolerance: float
) -> None:
    if np.std(values) < 1e-9:
        return
    found = judge(values, published, tolerance)
    num_seeds = len(values)
    statistic = (np.mean(values) - published) / (np.std(values, ddof=1) * (1 + 1 / num_seeds) ** 0.5)
    p_value = 2 * stats.t.sf(abs(statistic), num_seeds - 1)
    assert found.verdict == ("compatible" if p_value >= 0.05 else "above" if statistic > 0 else "below")
    not_below = ttest_1samp(values, published - tolerance, alternative="greater").pvalue
    not_above = ttest_1samp(values, published + tolerance, alternative="less").pvalue
    assert found.is_equal == (max(not_below, not_above) <= 0.05)


def test_fewer_than_three_seeds_decide_nothing() -> None:
    one, two = judge([60.1], 60.1, 1.0), judge([60.1, 60.1], 60.1, 1.0)
    assert (one.verdict, one.says) == ("undecided", "undecided (1 seed; at least 3 needed)")
    assert (two.verdict, two.is_equal, two.low) == ("undecided", False, None), "two equal values say nothing of their spread"


def test_by_hand() -> None:
    """For 59, 60, 61 one more run is within 60 ± 4.303 * 1 * sqrt(4 / 3) = 4.97; the mean's 90 % interval has half width 1.686."""
    values = [59.0, 60.0, 61.0]
    found = judge(values, 60.0, 1.7)
    assert (found.low, found.high) == pytest.approx((55.03, 64.97), abs=0.01)
    assert (found.says, judge(values, 60.0, 1.6).says) == ("compatible, mean equal", "compatible")
    assert [judge(values, published, 1.0).verdict for published in (55.0, 55.1)] == ["above", "compatible"]
    assert [judge(values, published, 1.0).verdict for published in (64.9, 65.0)] == ["compatible", "below"]


def test_a_printed_figure_is_rounded() -> None:
    values = [1.41421356, 1.41421357, 1.41421358]
    assert judge(values, 1.414, 0.1).verdict == "above"
    assert judge(values, 1.414, 0.1, rounding=0.0005).verdict == "compatible"
    assert judge(values, 1.413, 0.1, rounding=0.0005).verdict == "above"


def test_equal_values_of_few_queries_have_a_spread() -> None:
    """Three times 12 of 20 queries: standard deviation 10.95 points, half width of the 90 % interval 1.645 * 10.95 / sqrt 3 = 10.4."""
    values = [60.0] * 3
    assert not judge(values, 60.0, 1.0).is_equal, "a spread of 0 is not believed"
    assert not judge(values, 60.0, 1.0, num_queries=20, whole=100).is_equal
    assert not judge(values, 60.0, 10.3, num_queries=20, whole=100).is_equal
    assert judge(values, 60.0, 10.5, num_queries=20, whole=100).is_equal
    assert judge(values, 65.0, 1.0, num_queries=20, whole=100).verdict == "compatible", "one query more"
    assert judge([0.0] * 3, 0.0, 1.0, num_queries=20, whole=100).is_equal is False
    # s is one query, 5 points: one more run is within 60 ± 4.303 * 5 * sqrt(4 / 3) = 24.84
    assert [judge(values, figure, 1.0, num_queries=20, whole=100).verdict for figure in (84.8, 84.9)] == ["compatible", "below"]


@pytest.mark.parametrize(("factor", "num_queries", "fewest"), [(0.003, 60_502, 5), (0.006, 14_218, 6), (0.026, 5_924, 3)])
def test_fewer_seeds_than_the_fewest_cannot_show_an_equal_mean(factor: float, num_queries: int, fewest: int) -> None:
    """SOP, In-shop and CUB with the tolerances of `tolerances.yaml`: seeds without any spread, whose mean is the printed figure."""
    tolerance = factor * (76.3 * 23.7) ** 0.5
    assert fewest_for_equality(76.3, tolerance, num_queries, 100) == fewest
    equal = [judge([76.3] * num_seeds, 76.3, tolerance, num_queries, whole=100).is_equal for num_seeds in range(1, 9)]
    assert equal == [num_seeds >= fewest for num_seeds in range(1, 9)]


def share_compatible(num_seeds: int, num_draws: int) -> float:
    """Return the share of draws in which the paper's figure, one run of the same system, is compatible with our runs."""
    rng = np.random.default_rng(num_seeds)
    ours, printed = rng.normal(60, 1.5, (num_draws, num_seeds)), rng.normal(60, 1.5, num_draws)
    judged = [judge(row, figure, 1.0).verdict for row, figure in zip(ours.tolist(), printed.tolist(), strict=True)]
    return judged.count("compatible") / num_draws


@pytest.mark.parametrize("num_seeds", [3, 10])
def test_one_run_of_the_same_system_is_compatible_in_95_of_100(num_seeds: int) -> None:
    assert share_compatible(num_seeds, 3000) == pytest.approx(0.95, abs=0.013)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("num_seeds", [3, 5, 10, 20])
def test_a_true_reproduction_is_compatible_as_often_as_the_page_says(num_seeds: int) -> None:
    assert share_compatible(num_seeds, 20_000) == pytest.approx(0.95, abs=0.006), "four standard errors"


@pytest.mark.parametrize(("num_seeds", "num_queries"), [(3, 40), (5, 40), (5, 1000)])
def test_a_mean_a_tolerance_away_is_called_equal_in_5_of_100_at_most(num_seeds: int, num_queries: int) -> None:
    """Scores are shares of queries; the truth is two points above the printed figure, and the tolerance is two."""
    rng = np.random.default_rng(num_seeds)
    shares = 100 * rng.binomial(num_queries, 0.62, (2000, num_seeds)) / num_queries
    wrong = sum(judge(row, 60.0, 2.0, num_queries=num_queries, whole=100).is_equal for row in shares.tolist())
    assert wrong / 2000 < 0.06
