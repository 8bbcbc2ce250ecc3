"""Whole comparisons by hand and beside scipy, what they say in words, and how often they are wrong when nothing differs."""

import numpy as np
import pytest
from scipy import stats

from dml_core.evaluation.comparing import Comparison, compare, has_best
from dml_core.evaluation.statistics import holm

HAND = {
    "a": {0: 50.0, 1: 52.0, 2: 54.0},
    "b": {0: 49.0, 1: 50.0, 2: 51.0},  # a - b: 1, 2, 3
    "c": {0: 40.0, 1: 42.2, 2: 43.8},  # a - c: 10, 9.8, 10.2; b - c: 9, 7.8, 7.2
}


def compared(scores: dict[str, dict[int, float]], **options) -> Comparison:
    found = compare("d", "recall@1", scores, **options)
    assert found is not None
    return found


def drawn(means: dict[str, float], num_seeds: int, deviation: float = 1.0, seed: int = 0) -> dict[str, dict[int, float]]:
    """Scores with a part that all systems share by seed, and one of each."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(0, 3, num_seeds)
    return {name: {n: mean + shared[n] + rng.normal(0, deviation) for n in range(num_seeds)} for name, mean in means.items()}


def test_by_hand() -> None:
    """t is 2 / (1 / sqrt 3) = 3.464, 10 / (0.2 / sqrt 3) = 86.6 and 8 / (0.9165 / sqrt 3) = 15.12, with 2 degrees of freedom."""
    found = compared(HAND)
    assert found.means == pytest.approx({"a": 52.0, "b": 50.0, "c": 42.0})
    assert list(found.means) == ["a", "b", "c"]
    # of t with 2 degrees of freedom: P(|T| > t) = 1 - t / sqrt(2 + t^2)
    p_values = {names: 1 - t / (2 + t * t) ** 0.5 for names, t in {("a", "b"): 3.4641, ("a", "c"): 86.6025, ("b", "c"): 15.1186}.items()}
    corrected = {("a", "c"): 3 * p_values["a", "c"], ("b", "c"): 2 * p_values["b", "c"], ("a", "b"): p_values["a", "b"]}
    for pair in found.pairs:
        assert pair.p_value == pytest.approx(p_values[pair.system, pair.other], rel=1e-3)
        assert pair.p_holm == pytest.approx(corrected[pair.system, pair.other], rel=1e-3)
    first = found.pair("a", "b")
    assert (first.difference, first.deviation, first.half_width) == pytest.approx((2, 1, 4.3027 / 3**0.5), rel=1e-4)
    assert found.pair("b", "a").difference == -2
    assert (found.reference, found.is_named, found.not_told) == ("a", False, ("b",))
    assert found.in_bold == {"a", "b"}
    assert [(pair.system, pair.other, pair.difference) for pair in found.against] == [("b", "a", -2), ("c", "a", pytest.approx(-10))]
    assert found.sentence == "a is better than c by 10.0 ± 0.5 R@1 over 3 seeds; b cannot be told from a."


def test_a_named_reference_is_corrected_for_its_own_comparisons_alone() -> None:
    found = compared(HAND, reference="c")
    assert (found.reference, found.is_named) == ("c", True)
    assert [pair.system for pair in found.against] == ["a", "b"]
    assert [pair.p_holm for pair in found.against] == pytest.approx(holm([pair.p_value for pair in found.against]))
    assert found.sentence.endswith("b cannot be told from a; against the reference c, higher: a and b.")
    assert compared(HAND, reference="absent").reference == "a"


def test_every_pair_is_scipys_paired_t_test() -> None:
    scores = drawn({"a": 50, "b": 51, "c": 52, "d": 55}, 8)
    for pair in compared(scores).pairs:
        expected = stats.ttest_rel(list(scores[pair.system].values()), list(scores[pair.other].values()))
        interval = expected.confidence_interval()
        assert pair.p_value == pytest.approx(expected.pvalue)
        assert pair.difference is not None
        assert pair.half_width is not None
        assert (pair.difference - pair.half_width, pair.difference + pair.half_width) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ({"a": {0: 50.0}, "b": {0: 51.0}}, "b is highest (R@1 51.0), but one seed decides nothing."),
        (
            {"a": {0: 50.0, 1: 52.0}, "b": {2: 51.0, 3: 40.0}},
            "a is highest (R@1 51.0), but nothing is compared with it: no other system shares two seeds with it.",
        ),
        (
            {"a": {0: 50.0, 1: 52.0, 2: 51.0}, "b": {0: 49.0, 1: 52.5, 2: 51.0}},
            "a and b cannot be told apart: the first has 0.2 ± 1.9 R@1 more over 3 seeds.",
        ),
        (
            {"a": {0: 60.0, 1: 62.1, 2: 61.0}, "b": {0: 49.0, 1: 51.0, 2: 50.0}},
            "a is better than b by 11.0 ± 0.1 R@1 over 3 seeds.",
        ),
        ({"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 1.0}}, "a and b share the highest mean (R@1 1.5) over 2 seeds."),
        (
            {"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 1.0}, "c": {0: 0.0, 1: 0.5}},
            "a and b share the highest mean (R@1 1.5) over 2 seeds, and nothing can be told from a.",
        ),
        (
            {"a": {0: 5.0, 1: 9.0}, "b": {0: 6.0, 1: 3.0}, "c": {0: 1.0, 1: 3.0}},
            "a is highest (R@1 7.0), and none of the other 2 can be told from it over 2 seeds.",
        ),
        (
            HAND | {"b": {0: 49.0}},
            "a is better than c by 10.0 ± 0.5 R@1 over 3 seeds; b is not compared: fewer than two seeds shared with a; "
            "systems differ in their seeds, and each pair is compared over those that it shares.",
        ),
    ],
)
def test_it_is_said_in_words(scores: dict[str, dict[int, float]], sentence: str) -> None:
    assert compared(scores).sentence == sentence


def test_many_systems_are_counted_and_all_that_are_worse_are_said_to_be() -> None:
    found = compared(drawn({"a": 50, "b": 50, "c": 50, "d": 50, "e": 50, "far": 20}, 6))
    assert found.sentence.endswith(f"; 4 others cannot be told from {found.best}.")
    found = compared(drawn({"a": 90, "b": 70, "c": 50, "d": 30}, 6))
    assert found.sentence.endswith("over 6 seeds, and than each of the other 2.")
    assert found.in_bold == {"a"}
    assert found.sentence.startswith("a is better than b by ")


def test_nothing_is_bold_where_nothing_was_compared_and_one_system_is_no_comparison() -> None:
    assert compared({"a": {0: 1.0}, "b": {0: 2.0}}).in_bold == frozenset()
    assert compared({"a": {0: 1.0}, "b": {0: 2.0}}).limits is None
    assert compare("d", "recall@1", {"a": {0: 1.0, 1: 2.0}, "b": {}}) is None


def test_what_the_table_could_have_shown_is_found_as_often_as_it_says() -> None:
    """The smallest difference of a pair, drawn 4,000 times over with the deviation that the data have, is told at Holm's first step."""
    found = compared({"a": {n: float(value) for n, value in enumerate((3, 5, 4, 7, 6))}, "b": dict.fromkeys(range(5), 1.0)})
    assert found.smallest is not None
    (pair,) = found.pairs
    assert pair.deviation is not None
    samples = np.random.default_rng(1).normal(found.smallest, pair.deviation, (4000, 5))
    assert (stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.02)
    assert found.limits == f"A difference of {found.smallest:.1f} R@1 would be told with a chance of 0.8 (Holm over one pair)."


def test_the_seeds_that_are_needed_show_a_point_as_often_as_promised() -> None:
    found = compared(drawn({"a": 50, "b": 48}, 6, deviation=0.6))
    (needed,), (pair,) = found.needed, found.pairs
    assert needed.seeds is not None
    assert pair.deviation is not None
    samples = np.random.default_rng(2).normal(1.0, pair.deviation, (4000, needed.seeds))
    assert (stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05).mean() >= 0.78
    fewer = samples[:, : needed.seeds - 1]
    assert (stats.ttest_1samp(fewer, 0, axis=1).pvalue < 0.05).mean() < 0.82


@pytest.mark.slow
@pytest.mark.parametrize(("num_systems", "num_seeds"), [(2, 3), (4, 3), (4, 10), (8, 5)])
def test_equal_systems_are_told_apart_no_more_often_than_one_time_in_twenty(num_systems: int, num_seeds: int) -> None:
    """Although the best is chosen by the data. 1,200 tables: three standard errors above 0.05 is 0.069."""
    rng = np.random.default_rng(num_systems * num_seeds)
    wrong = 0
    for _ in range(1200):
        noise = rng.normal(0, 3, (num_seeds, 1)) + rng.normal(0, 1, (num_seeds, num_systems))
        found = compared({f"s{k}": dict(enumerate(noise[:, k].tolist())) for k in range(num_systems)}, points=None)
        wrong += len(found.not_told) < num_systems - 1
    assert wrong / 1200 < 0.069


def test_choosing_the_best_by_the_data_without_the_correction_over_pairs_would_be_wrong_too_often() -> None:
    """What the correction is for: Holm over the comparisons with the best alone finds a false one in far more than one table in twenty."""
    rng = np.random.default_rng(5)
    wrong = 0
    for _ in range(1000):
        noise = rng.normal(0, 1, (10, 8))
        noise = noise[:, noise.mean(axis=0).argsort()[::-1]]
        p_values = stats.ttest_rel(noise[:, :1], noise[:, 1:]).pvalue
        wrong += min(holm(p_values)) < 0.05
    assert wrong / 1000 > 0.1


@pytest.mark.slow
@pytest.mark.proof
def test_coarse_scores_of_few_seeds_are_not_told_apart_by_an_accident_of_equal_differences() -> None:
    """Shares of 50 queries: two differences are often the very same, which is no sign that they never vary."""
    rng = np.random.default_rng(6)
    wrong = 0
    for _ in range(1000):
        shares = rng.binomial(50, 0.5, (2, 6)) / 50
        found = compared({f"s{k}": dict(enumerate((100 * shares[:, k]).tolist())) for k in range(6)}, points=None)
        wrong += len(found.not_told) < 5
    assert wrong / 1000 < 0.05


def test_a_named_reference_keeps_the_level_too() -> None:
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(1200):
        noise = rng.normal(0, 1, (5, 6))
        found = compared({f"s{k}": dict(enumerate(noise[:, k].tolist())) for k in range(6)}, reference="s3", points=None)
        wrong += any(pair.is_told for pair in found.against)
    assert wrong / 1200 < 0.069


@pytest.mark.parametrize(
    ("metric", "has_one"), [("recall@1", True), ("nmi", True), ("csc", False), ("num_queries", False), ("recall@1_class_mean", False)]
)
def test_only_metrics_of_which_more_is_better_have_a_best(metric: str, has_one: bool) -> None:
    assert has_best(metric) is has_one
