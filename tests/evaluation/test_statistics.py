"""The tests of differences compared with SciPy's, hand calculations and simulations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dml_core.evaluation.statistics.paired import (
    MIN_SEEDS,
    holm,
    paired_difference,
    power,
    seeds_needed,
    smallest_difference,
)


def test_a_paired_difference_is_scipys_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    values, references = rng.normal(0.6, 0.1, 7), rng.normal(0.5, 0.1, 7)
    found, expected = paired_difference(values, references), stats.ttest_rel(values, references)
    interval = expected.confidence_interval()
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx((interval.low, interval.high))
    assert found.num_seeds == 7


@pytest.mark.parametrize(
    ("values", "reference", "p_value"),
    [
        ([1.0, 2.0], [1.0, 2.0], 1.0),
        ([1.0, 2.0], [0.0, 1.0], 0.5),
        ([0.851, 0.823, 0.9], [0.842, 0.814, 0.891], 0.25),  # 0.009 three times, apart from the last bits
    ],
)
def test_differences_that_do_not_vary_have_the_sign_tests_p_value(values: list[float], reference: list[float], p_value: float) -> None:
    found = paired_difference(values, reference)
    assert (found.p_value, found.deviation, found.half_width) == (p_value, 0.0, 0.0)
    if p_value < 1:
        assert stats.binomtest(len(values), len(values)).pvalue == p_value


def test_holm_by_hand() -> None:
    # sorted: 0.005 * 4, 0.01 * 3, 0.03 * 2, 0.04 * 1, each at least the one before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_none_and_bonferroni_and_keeps_the_order(p_values: list[float]) -> None:
    adjusted = np.array(holm(p_values))
    assert (adjusted >= p_values).all()
    assert (adjusted <= np.minimum(1, len(p_values) * np.array(p_values)) + 1e-12).all()
    assert (np.diff(adjusted[np.argsort(p_values, kind="stable")]) >= 0).all()


def test_holm_keeps_the_chance_of_any_false_find_at_the_level() -> None:
    rng = np.random.default_rng(1)
    false_finds = sum(
        min(holm([paired_difference(row, np.zeros(5)).p_value for row in rng.standard_normal((6, 5))])) < 0.05 for _ in range(2000)
    )
    assert false_finds / 2000 == pytest.approx(0.05, abs=0.015)  # six independent comparisons; 0.26 without correction


@pytest.mark.parametrize("num_seeds", [3, 5, 12])
def test_the_power_is_what_simulated_tests_have(num_seeds: int) -> None:
    samples = np.random.default_rng(2).normal(1.0, 0.8, (20_000, num_seeds))
    share = (stats.ttest_1samp(samples, 0.0, axis=1).pvalue < 0.05).mean()
    assert power(1.0, 0.8, num_seeds) == pytest.approx(share, abs=0.012)


@pytest.mark.parametrize(("num_seeds", "level"), [(2, 0.05), (2, 0.001), (3, 0.0008), (5, 0.01), (31, 0.0008), (200, 0.05)])
@pytest.mark.parametrize("wanted", [0.3, 0.8])
def test_the_power_holds_for_few_seeds_and_small_levels_too(num_seeds: int, level: float, wanted: float) -> None:
    """SciPy's noncentral t fails here. The reference draws 200,000 means and, independently, sample variances."""
    rng, shift = np.random.default_rng(num_seeds), smallest_difference(1.0, num_seeds, wanted, level) * num_seeds**0.5
    t = (rng.normal(shift, 1, 200_000)) / np.sqrt(rng.chisquare(num_seeds - 1, 200_000) / (num_seeds - 1))
    assert (np.abs(t) > stats.t.ppf(1 - level / 2, num_seeds - 1)).mean() == pytest.approx(wanted, abs=0.005)


@pytest.mark.parametrize("num_seeds", [6, 20, 31, 40, 300])
def test_the_power_is_the_noncentral_ts_where_that_is_right(num_seeds: int) -> None:
    shift, threshold = 0.2 * num_seeds**0.5, stats.t.ppf(0.975, num_seeds - 1)
    expected = stats.nct.sf(threshold, num_seeds - 1, shift) + stats.nct.cdf(-threshold, num_seeds - 1, shift)
    assert power(0.2, 1.0, num_seeds) == pytest.approx(expected, abs=1e-6)


def test_the_smallest_difference_has_the_wanted_power_and_the_fewest_seeds_are_the_fewest() -> None:
    assert power(smallest_difference(2.0, 6), 2.0, 6) == pytest.approx(0.8, abs=1e-6)
    needed = seeds_needed(1.0, 2.0)
    assert needed is not None
    assert power(1.0, 2.0, needed) >= 0.8 > power(1.0, 2.0, needed - 1)
    assert needed == 34  # textbook value: a paired t test for an effect of half a deviation
    assert seeds_needed(1e-6, 1.0) is None
    assert (seeds_needed(1.0, 0.0), smallest_difference(0.0, 5)) == (MIN_SEEDS, 0.0)
    assert seeds_needed(1.0, 0.01) == MIN_SEEDS, "fewer are never compared, whatever their power"
