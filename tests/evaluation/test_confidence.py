"""Intervals calculated by hand with tables of Student's t."""

import warnings

import numpy as np
import pytest

from dml_core.evaluation.statistics.confidence import interval_over_units


def test_the_interval_over_units_by_hand() -> None:
    """Three classes of one query each, 0.2, 0.5 and 0.8: mean 0.5, standard deviation 0.3, error 0.3 / sqrt(3); t(0.975, 2) = 4.3027."""
    low, high = interval_over_units(np.array([[0.2], [0.5], [0.8]]), np.array([4, 9, 7]))
    half = 4.3027 * 0.3 / 3**0.5 / 0.25  # in logits; the inverse logit has the slope 0.5 * (1 - 0.5)
    assert [low[0], high[0]] == pytest.approx([1 / (1 + np.exp(half)), 1 / (1 + np.exp(-half))], abs=1e-5)
    wider = interval_over_units(np.array([[0.2], [0.5], [0.8]]), np.array([4, 9, 7]), 0.99)
    assert wider[0][0] < low[0]
    assert wider[1][0] > high[0]


def test_classes_of_unequal_size_are_left_out_one_by_one() -> None:
    """Three zeros in one class, 0.5 in another: the mean 1/8 becomes 1/2 or 0 without one of them; t(0.975, 1) = 12.7062."""
    low, high = interval_over_units(np.array([[0.0], [0], [0], [0.5]]), np.array([7, 7, 7, 9]))
    error = (1 / 2 * ((1 / 2 - 1 / 4) ** 2 + (0 - 1 / 4) ** 2)) ** 0.5
    logits = np.log(1 / 7) + 12.7062 * error / (1 / 8 * 7 / 8) * np.array([-1, 1])
    assert [low[0], high[0]] == pytest.approx((1 / (1 + np.exp(-logits))).tolist(), rel=1e-3, abs=1e-6)


def test_of_many_ordinary_queries_it_is_the_normal_interval() -> None:
    values = np.random.default_rng(0).uniform(0.3, 0.7, (4000, 2))
    low, high = interval_over_units(values, np.arange(4000))
    np.testing.assert_allclose(high - low, 2 * 1.96 * values.std(axis=0) / 4000**0.5, rtol=0.002)
    np.testing.assert_allclose((high + low) / 2, values.mean(axis=0), atol=1e-4)


def test_what_does_not_vary_has_no_interval() -> None:
    values = np.array([[1.0, 0, 0.1 + 0.2, 0.4], [1, 0, 0.3, 0.2], [1, 0, 0.3, 0.3], [1, 0, 0.3, 0.1]])
    with warnings.catch_warnings(action="error"):
        low, high = interval_over_units(values, np.arange(4))
        one = interval_over_units(values, np.zeros(4, dtype=int))
    assert np.isnan(low).tolist() == np.isnan(high).tolist() == [True, True, True, False]
    assert np.isnan(one).all()
