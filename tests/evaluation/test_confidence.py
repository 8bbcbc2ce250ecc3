"""Bootstrap against the theory of means, and intervals over seeds against a table of Student's t."""

import numpy as np
import pytest

from dml_core.evaluation.confidence import Summary, bootstrap_means, mean_over_seeds, percentile_interval, summarise


def test_spread_over_queries_is_the_standard_error() -> None:
    values = np.random.default_rng(0).standard_normal((400, 2)) * [1, 3] + [5, 0]
    means = bootstrap_means(values, np.arange(400), num_replicates=4000, seed=0)
    np.testing.assert_allclose(means.std(axis=0), values.std(axis=0) / 20, rtol=0.05)
    np.testing.assert_allclose(means.mean(axis=0), values.mean(axis=0), atol=0.01)
    low, high = percentile_interval(means, 0.95)
    np.testing.assert_allclose(high - low, 2 * 1.96 * values.std(axis=0) / 20, rtol=0.07)


def test_interval_ends_leave_out_the_same_share_on_both_sides() -> None:
    low, high = percentile_interval(np.stack([np.arange(101.0), 2 * np.arange(101.0)], axis=1), 0.9)
    np.testing.assert_allclose([low, high], [[5, 10], [95, 190]])


def test_queries_of_one_class_are_drawn_together() -> None:
    """Ten classes whose queries all agree: the spread is that of ten values, not of a hundred."""
    by_class = np.random.default_rng(0).standard_normal(10)
    codes = np.repeat(np.arange(10), 10)
    means = bootstrap_means(by_class[codes, None], codes, num_replicates=4000, seed=0)
    assert means.std() == pytest.approx(by_class.std() / 10**0.5, rel=0.05)


def test_classes_of_unequal_size_keep_the_mean_over_queries() -> None:
    """One class of 3 zeros and one of 1 one: drawn together 1/4, or one of them twice."""
    means = bootstrap_means(np.array([[0.0], [0], [0], [1]]), np.array([7, 7, 7, 9]), num_replicates=200, seed=0)
    assert set(means.ravel().tolist()) == {0, 0.25, 1}


def test_the_same_seed_draws_the_same() -> None:
    values, codes = np.arange(20.0)[:, None], np.arange(20)
    np.testing.assert_array_equal(bootstrap_means(values, codes, 9, seed=3), bootstrap_means(values, codes, 9, seed=3))
    assert (bootstrap_means(values, codes, 9, seed=3) != bootstrap_means(values, codes, 9, seed=4)).any()


def test_mean_over_seeds() -> None:
    # Standard deviation 1, error 1 / sqrt(5) of five runs; t(0.975, 4) = 2.776 in any table.
    values = np.sqrt(5 / 2) * np.array([-1, -0.5, 0, 0.5, 1]) * np.sqrt(4 / 5) * 1.0
    values = values / np.std(values, ddof=1) + 70
    mean, half_width = mean_over_seeds(values.tolist())
    assert mean == pytest.approx(70)
    assert half_width == pytest.approx(2.776 / 5**0.5, abs=1e-3)
    assert np.isnan(mean_over_seeds([70.0])[1])


def test_an_interval_needs_two_seeds() -> None:
    """0.2 and 0.4: standard deviation sqrt(0.02), error 0.1; t(0.975, 1) = 12.706 in any table."""
    assert summarise([0.123]) == Summary(0.123, None, 1)
    assert str(summarise([0.123])) == "12.3"
    both = summarise([0.2, 0.4])
    assert (both.mean, both.half_width, both.num_seeds) == (pytest.approx(0.3), pytest.approx(1.2706, abs=1e-4), 2)
    assert str(both) == "30.0 ± 127.1"
