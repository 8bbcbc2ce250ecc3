"""Coverage of intervals: each statement about it in docs/reference/metrics.md and
docs/explanation/can-i-trust-the-numbers.md is a simulation here.

Each simulation fails for intervals from bootstrap percentiles or a normal quantile (`test_..._would_be_too_narrow`). The default tests
detect a broken method, the proof tests check the numbers on the pages.
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from dml_core.evaluation.statistics.confidence import interval_over_units
from dml_core.evaluation.statistics.over_seeds import summarise_seeds

Drawn = tuple[NDArray[np.float64], NDArray[np.int64], float]
SIZES = ("equal", "some", "wild")
RECALLS = {"even": (2.0, 2.0), "narrow": (20.0, 20.0), "high": (9.0, 1.0)}  # Beta distributions of the classes' true recalls


def drawn(recalls: str, sizes: str, num_classes: int, rng: np.random.Generator) -> Drawn:
    """Return simulated hits of queries, their classes, and the mean over all possible classes."""
    first, second = RECALLS[recalls]
    size = {"equal": np.full(num_classes, 20), "some": rng.integers(5, 40, num_classes)}.get(
        sizes, np.ceil(rng.lognormal(2.5, 1.0, num_classes)).astype(int)
    )
    codes = np.arange(num_classes).repeat(size)
    hits = rng.random(len(codes)) < rng.beta(first, second, num_classes)[codes]
    return hits[:, None].astype(float), codes, first / (first + second)


def share_held(recalls: str, sizes: str, num_classes: int, num_draws: int) -> float:
    """Return how often the 95 % interval over classes covers the truth, among draws that have an interval."""
    rng, held = np.random.default_rng(num_classes), []
    for _ in range(num_draws):
        values, codes, truth = drawn(recalls, sizes, num_classes, rng)
        (low,), (high,) = interval_over_units(values, codes)
        if not np.isnan(low):
            held.append(low <= truth <= high)
    return float(np.mean(held))


@pytest.mark.parametrize(("recalls", "sizes", "num_classes"), [("even", "some", 4), ("narrow", "equal", 10), ("high", "some", 10)])
def test_intervals_over_few_classes_keep_their_promise(recalls: str, sizes: str, num_classes: int) -> None:
    assert share_held(recalls, sizes, num_classes, 1000) > 0.92


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("num_classes", [2, 3, 4, 10, 30, 100])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recalls", RECALLS)
def test_intervals_over_classes_hold_the_truth_as_often_as_the_page_says(recalls: str, sizes: str, num_classes: int) -> None:
    held = share_held(recalls, sizes, num_classes, 3000)
    assert held > (0.90 if sizes == "wild" else 0.93)
    assert held < 0.98 or num_classes < 10, "few classes have few possible means, and wider intervals"


def test_the_bootstraps_percentiles_would_be_too_narrow() -> None:
    """The former method: its intervals cover the truth in about 8 of 10 cases with 4 classes, in these same draws."""
    rng, held = np.random.default_rng(4), 0
    for _ in range(200):
        values, codes, truth = drawn("even", "some", 4, rng)
        sums, sizes = np.bincount(codes, values[:, 0]), np.bincount(codes)
        resampled = np.random.default_rng(0).integers(0, 4, (100, 4))
        low, high = np.quantile(sums[resampled].sum(axis=1) / sizes[resampled].sum(axis=1), [0.025, 0.975])
        held += low <= truth <= high
    assert held / 200 < 0.87


def test_a_normals_quantile_would_be_too_narrow() -> None:
    rng, held = np.random.default_rng(4), 0
    for _ in range(400):
        values, codes, truth = drawn("even", "some", 4, rng)
        (low,), (high,) = interval_over_units(values, codes, confidence=0.855)  # Student's t of 3 degrees at 1.96
        held += low <= truth <= high
    assert held / 400 < 0.9


@pytest.mark.parametrize("recall", [0.3, 0.9, 0.97])
@pytest.mark.parametrize("num_queries", [20, 50, 200])
def test_intervals_over_queries_keep_their_promise(num_queries: int, recall: float) -> None:
    """For other queries of the same classes, drawn independently."""
    rng = np.random.default_rng(num_queries)
    hits = (rng.random((num_queries, 2000)) < recall).astype(float)
    low, high = interval_over_units(hits, np.arange(num_queries))
    varies = ~np.isnan(low)
    assert 0.93 < ((low <= recall) & (recall <= high))[varies].mean() < (0.995 if num_queries < 200 else 0.975)


@pytest.mark.parametrize("num_seeds", [3, 5, 11])
def test_intervals_over_seeds_keep_their_promise(num_seeds: int) -> None:
    values = np.random.default_rng(num_seeds).normal(0.5, 0.02, (4000, num_seeds))
    means, half_widths, _ = np.array([summarise_seeds(row) for row in values]).T  # type: ignore[arg-type]
    assert (np.abs(means - 0.5) <= half_widths).mean() == pytest.approx(0.95, abs=0.012)
