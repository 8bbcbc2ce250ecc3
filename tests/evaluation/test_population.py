"""Intervals over seeds and classes: by hand, and their coverage of simulated truths."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dml_core.evaluation.statistics.paired import difference_over_classes


def test_by_hand() -> None:
    """Means of seeds 0, 1, 2 (variance 1) and means of classes 0.5 or 1.5, five times each (variance 10 / 36)."""
    differences = np.arange(3.0)[:, None] + np.repeat([-0.5, 0.5], 5)[None, :]
    of_seeds, of_classes = 1 / 3, 10 / 36 / 10
    freedom = (of_seeds + of_classes) ** 2 / (of_seeds**2 / 2 + of_classes**2 / 9)
    expected = 1.0, stats.t.ppf(0.975, freedom) * (of_seeds + of_classes) ** 0.5
    assert difference_over_classes(50 + differences, np.full((3, 10), 50.0)) == pytest.approx(expected)


@pytest.mark.parametrize(("num_seeds", "num_classes"), [(2, 60), (11, 5), (11, 9)])
def test_nothing_is_claimed_of_few_seeds_or_classes(num_seeds: int, num_classes: int) -> None:
    values = np.random.default_rng(0).normal(size=(num_seeds, num_classes))
    assert difference_over_classes(values, np.zeros_like(values)) is None


def share_held(num_seeds: int, num_classes: int, parts: tuple[float, float, float], num_draws: int) -> float:
    """Return how often the interval covers 0, with these deviations of seeds, classes and their interaction."""
    rng, held = np.random.default_rng([num_seeds, num_classes]), 0
    for _ in range(num_draws):
        found = difference_over_classes(_drawn(rng, num_seeds, num_classes, parts), np.zeros((num_seeds, num_classes)))
        assert found is not None
        held += abs(found[0]) <= found[1]
    return held / num_draws


def _drawn(rng: np.random.Generator, num_seeds: int, num_classes: int, parts: tuple[float, float, float]) -> NDArray[np.float64]:
    seeds, classes, both = parts
    main = rng.normal(0, seeds, (num_seeds, 1)) + rng.normal(0, classes, (1, num_classes))
    return np.asarray(main + rng.normal(0, both, (num_seeds, num_classes)), dtype=np.float64)


@pytest.mark.parametrize("parts", [(2.0, 0.0, 10.0), (1.0, 8.0, 10.0), (0.0, 8.0, 0.0)])
def test_the_interval_holds_the_truth_for_other_seeds_and_classes(parts: tuple[float, float, float]) -> None:
    assert share_held(5, 20, parts, 1000) > 0.93


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("parts", [(2.0, 0.0, 0.0), (2.0, 0.0, 10.0), (1.0, 8.0, 10.0), (0.0, 8.0, 0.0), (3.0, 3.0, 3.0)])
@pytest.mark.parametrize(("num_seeds", "num_classes"), [(3, 10), (3, 60), (5, 10), (11, 60)])
def test_the_interval_holds_the_truth_as_often_as_the_page_says(
    num_seeds: int, num_classes: int, parts: tuple[float, float, float]
) -> None:
    assert share_held(num_seeds, num_classes, parts, 5000) > 0.92


def test_an_interval_over_seeds_alone_is_not_about_other_classes() -> None:
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        means = _drawn(rng, 11, 20, (1.0, 8.0, 10.0)).mean(axis=1)
        held += stats.ttest_1samp(means, 0).pvalue > 0.05
    assert held / 300 < 0.8
