"""Whole comparisons: calculated by hand, compared with SciPy, their sentences, and their error rates."""

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from dml_core.evaluation.statistics.comparing import Comparison, compare, differences

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
    """Return scores with a part that all systems share by seed, and a part of each system."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(0, 3, num_seeds)
    return {name: {n: mean + shared[n] + rng.normal(0, deviation) for n in range(num_seeds)} for name, mean in means.items()}


def test_by_hand() -> None:
    """t is 2 / (1 / sqrt 3) = 3.464, 10 / (0.2 / sqrt 3) = 86.6 and 8 / (0.9165 / sqrt 3) = 15.12, with 2 degrees of freedom."""
    found = compared(HAND)
    assert found.means == pytest.approx({"a": 52.0, "b": 50.0, "c": 42.0})
    assert list(found.means) == ["a", "b", "c"]
    # for t with 2 degrees of freedom: P(|T| > t) = 1 - t / sqrt(2 + t^2)
    p_values = {names: 1 - t / (2 + t * t) ** 0.5 for names, t in {("a", "b"): 3.4641, ("a", "c"): 86.6025, ("b", "c"): 15.1186}.items()}
    for pair in found.pairs:
        assert pair.p_value == pytest.approx(p_values[pair.system, pair.other], rel=1e-3)
        assert pair.p_adjusted == pytest.approx(3 * p_values[pair.system, pair.other], rel=1e-3)
    (_, (_, first, _)), (_, (reverse, _, _)), _ = found.matrix
    assert first is not None
    assert reverse is not None
    # t(2) at 0.05 / 6 is 7.649
    assert (first.difference, first.deviation, first.half_width) == pytest.approx((2, 1, 7.649 / 3**0.5), rel=1e-3)
    assert reverse.difference == -2
    assert (found.reference, found.is_named) == ("a", False)
    assert [(pair.system, pair.other, pair.difference) for pair in found.against] == [("b", "a", -2), ("c", "a", pytest.approx(-10))]


def test_the_set_of_the_best_by_hand() -> None:
    """One-sided at 0.05 / 2: t(2) = 4.303. a - b: 2 ± 2.48; a - c: 10 ± 0.50; b - c: 8 ± 2.28. So b may be the best and c is not."""
    found = compared(HAND)
    assert found.best_set == {"a", "b"}
    expected = {"a": (2 - 2.484, 2 + 2.484), "b": (-2 - 2.484, -2 + 2.484), "c": (-10 - 0.497, 0)}  # c - a; c - b would give -10.3
    for name, interval in expected.items():
        assert found.to_best[name] == pytest.approx(interval, abs=2e-3)
    assert [found.difference_text(name) for name in "abc"] == ["-0.5 to +4.5", "-4.5 to +0.5", "-10.5 to +0.0"]
    alone = compared({"a": HAND["a"], "c": HAND["c"]})
    assert alone.best_set == {"a"}
    assert alone.to_best["a"][0] == 0.0
    assert (
        found.sentence
        == "Best mean R@1: a, 52.0. The best is one of a and b (95 % confidence). Significantly worse than a: c (-10.0 ± 0.9). 3 seeds."
    )


def test_a_system_that_was_not_compared_with_the_best_has_no_lower_end() -> None:
    """Between `high` and `low`, which share no seed, only the sum of two differences is known, and no bound on it is simultaneous."""
    middle = {0: 50.0, 1: 52.0, 2: 54.0, 3: 50.0, 4: 52.0, 5: 54.0}
    found = compared({"middle": middle, "low": {0: 40.0, 1: 42.2, 2: 43.8}, "high": {3: 60.0, 4: 62.2, 5: 63.8}})
    assert found.best_set == {"high"}
    assert found.to_best["low"] == (None, 0.0)
    assert [found.difference_text(name) for name in ("high", "middle", "low")] == ["+0.0 to +10.5", "-10.5 to +0.0", "at most +0.0"]


def test_a_named_reference_is_corrected_for_its_own_comparisons_alone() -> None:
    found = compared(HAND, reference="c")
    assert (found.reference, found.is_named) == ("c", True)
    assert [pair.system for pair in found.against] == ["a", "b"]
    assert [pair.p_adjusted for pair in found.against] == pytest.approx([2 * (pair.p_value or 0) for pair in found.against])
    # t(2) at 0.05 / 4 is 6.205: 10 ± 6.205 * 0.2 / sqrt 3 and 8 ± 6.205 * 0.9165 / sqrt 3
    assert [found.difference_text(name) for name in "abc"] == ["+10.0 ± 0.7", "+8.0 ± 3.3", "reference"]
    assert "Compared with c: 2 better. 3 seeds." in found.sentence
    assert compared(HAND, reference="absent").reference == "a"


def test_the_differences_alone_are_those_of_the_comparison() -> None:
    scores = drawn({"a": 50, "b": 51, "c": 52, "d": 55}, 5)
    for reference in (None, "b"):
        assert differences(scores, reference, 1.0) == list(compared(scores, reference=reference).against)


def test_every_pair_is_scipys_paired_t_test() -> None:
    scores = drawn({"a": 50, "b": 51, "c": 52, "d": 55}, 8)
    for pair in compared(scores).pairs:
        expected = stats.ttest_rel(list(scores[pair.system].values()), list(scores[pair.other].values()))
        interval = expected.confidence_interval(1 - 0.05 / 6)
        assert pair.p_value == pytest.approx(expected.pvalue)
        assert pair.difference is not None
        assert pair.half_width is not None
        assert (pair.difference - pair.half_width, pair.difference + pair.half_width) == pytest.approx((interval.low, interval.high))
        assert pair.is_significant == (abs(pair.difference) > pair.half_width)


def test_posteriors_are_shares_of_draws() -> None:
    """Draws of the mean of normal differences under the reference prior: sigma^2 by scaled inverse chi-squared, then the mean."""
    scores = drawn({"a": 51, "b": 50}, 6)
    (pair,) = compared(scores).pairs
    gaps = np.array([scores[pair.system][n] - scores[pair.other][n] for n in range(6)])
    rng = np.random.default_rng(0)
    sigmas = gaps.std(ddof=1) * (5 / rng.chisquare(5, 200_000)) ** 0.5
    means = rng.normal(gaps.mean(), sigmas / 6**0.5)
    assert pair.posterior == pytest.approx(((means > 1).mean(), (np.abs(means) <= 1).mean(), (means < -1).mean()), abs=0.005)
    assert pair.reversed.posterior == pair.posterior[::-1]


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ({"a": {0: 50.0}, "b": {0: 51.0}}, "Best mean R@1: b, 51.0. Nothing is compared: fewer than 3 shared seeds."),
        (
            {"a": {0: 50.0, 1: 52.0}, "b": {0: 49.0, 1: 51.0}},
            "Best mean R@1: a, 51.0. Nothing is compared: fewer than 3 shared seeds.",
        ),
        (
            {"a": {0: 50.0, 1: 52.0, 2: 51.0}, "b": {0: 49.0, 1: 52.5, 2: 51.0}},
            "Best mean R@1: a, 51.0. Either may be the best (95 % confidence). 3 seeds.",
        ),
        (
            {"a": {0: 60.0, 1: 62.1, 2: 61.0}, "b": {0: 49.0, 1: 51.0, 2: 50.0}},
            "Best mean R@1: a, 61.0. a is the best (95 % confidence). Significantly worse than a: b (-11.0 ± 0.1). 3 seeds.",
        ),
        (
            {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: 2.0, 1: 1.0, 2: 3.0}},
            "Best mean R@1: a and b, 2.0. Either may be the best (95 % confidence). 3 seeds.",
        ),
        (
            HAND | {"b": {0: 49.0}},
            "Best mean R@1: a, 52.0. a is the best of the compared systems (95 % confidence). "
            "Significantly worse than a: c (-10.0 ± 0.5). Not compared: b (fewer than 3 shared seeds). "
            "Systems differ in their seeds; each pair is compared over those that it shares.",
        ),
        (
            {"new": {0: 90.0}, "a": {0: 60.0, 1: 62.1, 2: 61.0}, "b": {0: 49.0, 1: 51.0, 2: 50.0}},
            "Best mean R@1: new, 90.0. a is the best of the compared systems (95 % confidence). "
            "Not compared: new (fewer than 3 shared seeds). "
            "Systems differ in their seeds; each pair is compared over those that it shares.",
        ),
    ],
)
def test_it_is_said_in_words(scores: dict[str, dict[int, float]], sentence: str) -> None:
    assert compared(scores).sentence == sentence


def test_many_systems_are_counted_and_the_classes_are_named() -> None:
    found = compared(drawn({"a": 50, "b": 50, "c": 50, "d": 50, "e": 50, "far": 20}, 6), num_classes=60)
    assert found.sentence.startswith("Best mean R@1 on these 60 classes: ")
    assert found.best_set == {"a", "c", "d", "e"}
    assert " The best is one of c, e, a and d (95 % confidence). Significantly worse than c: far (" in found.sentence
    assert "Any of the 6 may be the best" in compared(drawn(dict.fromkeys("abcdef", 50.0), 3)).sentence
    assert " or one of 5 others (95 % confidence)." in compared(drawn(dict.fromkeys("abcdef", 50.0) | {"far": 20}, 3)).sentence
    found = compared(drawn({"a": 90, "b": 70, "c": 50, "d": 30}, 6))
    assert found.sentence.endswith(") and 2 others. 6 seeds.")
    assert found.best_set == {"a"}


def test_no_system_is_bold_where_nothing_was_compared_and_one_system_is_no_comparison() -> None:
    assert compared({"a": {0: 1.0}, "b": {0: 2.0}}).best_set == frozenset()
    assert compared({"a": {0: 1.0}, "b": {0: 2.0}}).limits is None
    assert compare("d", "recall@1", {"a": {0: 1.0, 1: 2.0}, "b": {}}) is None


def test_only_pairs_that_were_tested_are_counted() -> None:
    """Of six pairs one shares three seeds, so it is corrected for one test, and so are the seeds that it needs."""
    noisy = drawn({"a": 60, "b": 55}, 5, deviation=2.0)
    found = compared(noisy | {"c": {7: 50.0}, "d": {8: 40.0}})
    alone = compared(noisy)
    assert found.limits == alone.limits is not None
    assert found.needed[0] == alone.needed[0]
    assert found.pairs[0].level == alone.pairs[0].level == 0.05


def test_many_leaders_are_the_first_and_a_number() -> None:
    found = compared({name: dict.fromkeys(range(3), 100.0) for name in "abcde"} | {"f": {0: 90.0, 1: 91.0, 2: 93.0}})
    assert found.sentence.startswith("Best mean R@1: a and 4 others, 100.0. ")


def test_scores_that_do_not_vary_show_no_limit() -> None:
    assert compared({"a": dict.fromkeys(range(3), 90.0), "b": dict.fromkeys(range(3), 80.0)}).limits is None


def test_differences_that_are_the_same_by_accident_leave_the_set_as_it_is() -> None:
    """One more correct query of 20 in each of three seeds; the sign test if the number of queries is unknown."""
    scores = {"a": dict.fromkeys(range(3), 55.0), "b": dict.fromkeys(range(3), 50.0)}
    for num_queries in (None, 20):
        found = compared(scores, num_queries=num_queries)
        assert found.best_set == {"a", "b"}
        assert not found.pairs[0].is_significant
    assert compared(scores, num_queries=20_000).best_set == {"a"}, "1,000 queries more are no accident"


def test_what_the_table_could_have_shown_is_found_as_often_as_it_says() -> None:
    """The smallest detectable difference of a pair, simulated 4,000 times with the deviation of the data."""
    found = compared({"a": {n: float(value) for n, value in enumerate((3, 5, 4, 7, 6))}, "b": dict.fromkeys(range(5), 1.0)})
    assert found.smallest is not None
    (pair,) = found.pairs
    assert pair.deviation is not None
    samples = np.random.default_rng(1).normal(found.smallest, pair.deviation, (4000, 5))
    assert (stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.02)
    assert found.limits == f"This comparison detects differences of {found.smallest:.1f} points with 80 % power (one pair)."


def test_the_smallest_difference_is_in_the_unit_of_the_scores() -> None:
    """Points are per cent: shares and metrics without points have a number alone."""
    scores = {"a": {n: float(value) for n, value in enumerate((3, 5, 4, 7, 6))}, "b": dict.fromkeys(range(5), 1.0)}
    for points, scale, expected in (
        (1.0, 1, "detects differences of 2.66 points with"),
        (0.01, 0.1, "detects differences of 0.27 with"),
        (None, 1, "detects differences of 2.66 with"),
        (1.0, 40, "is too small to detect a difference with 80 % power (one pair)"),
        (0.01, 0.4, "is too small to detect a difference with"),
    ):
        scaled = {name: {seed: scale * value for seed, value in values.items()} for name, values in scores.items()}
        limits = compared(scaled, points=points, decimals=2).limits
        assert limits is not None
        assert expected in limits


def test_a_pair_is_read_from_either_side() -> None:
    found = compared(HAND)
    assert found.matrix[0][1][1] == found.pairs[0]
    assert found.matrix[1][1][0] == found.pairs[0].reversed
    assert [[pair and (pair.system, pair.other) for pair in row] for _, row in found.matrix] == [
        [None, ("a", "b"), ("a", "c")],
        [("b", "a"), None, ("b", "c")],
        [("c", "a"), ("c", "b"), None],
    ]


def test_the_seeds_that_are_needed_show_a_point_as_often_as_promised() -> None:
    found = compared(drawn({"a": 50, "b": 48}, 6, deviation=0.6))
    (needed,), (pair,) = found.needed, found.pairs
    assert needed.seeds is not None
    assert pair.deviation is not None
    samples = np.random.default_rng(2).normal(1.0, pair.deviation, (4000, needed.seeds))
    assert (stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05).mean() >= 0.78
    fewer = samples[:, : needed.seeds - 1]
    assert (stats.ttest_1samp(fewer, 0, axis=1).pvalue < 0.05).mean() < 0.82


# ---------------------------------------------------------------- simulated coverage


def shares(num_systems: int, num_seeds: int, spread: float, num_tables: int, reference: str | None = None) -> dict[str, float]:
    """Return how often the set contains the best system and all intervals of a kind cover the truth at once, and the mean set size.

    Args:
        num_systems, num_seeds: systems and seeds of each table.
        spread: standard deviation of the true means, in standard deviations of a run without its seed's shared part.
        num_tables: number of simulated tables.
        reference: a reference chosen in advance.
    """
    rng = np.random.default_rng([num_systems, num_seeds, int(10 * spread)])
    held = {"set": 0.0, "to best": 0.0, "against": 0.0, "pairs": 0.0, "size": 0.0}
    for _ in range(num_tables):
        truth = dict(zip((f"s{k}" for k in range(num_systems)), rng.normal(50, spread, num_systems).tolist(), strict=True))
        scores = np.array(list(truth.values())) + rng.normal(0, 3, (num_seeds, 1))
        scores = scores + rng.normal(0, 1, scores.shape)
        table = {name: dict(enumerate(scores[:, k].tolist())) for k, name in enumerate(truth)}
        found = compare("d", "nmi", table, reference, points=None)
        assert found is not None
        held["set"] += max(truth, key=lambda name: truth[name]) in found.best_set
        held["size"] += len(found.best_set)
        gaps = {name: truth[name] - max(value for other, value in truth.items() if other != name) for name in truth}
        held["to best"] += all(low <= gaps[name] <= high for name, (low, high) in found.to_best.items())
        for kind, pairs in (("against", found.against), ("pairs", found.pairs)):
            held[kind] += all(abs(pair.difference - truth[pair.system] + truth[pair.other]) <= pair.half_width for pair in pairs)
    return {kind: count / num_tables for kind, count in held.items()}


@pytest.mark.parametrize(("num_systems", "num_seeds", "spread"), [(2, 3, 0.0), (6, 5, 0.3), (12, 5, 1.0)])
def test_sets_and_intervals_hold_the_truth(num_systems: int, num_seeds: int, spread: float) -> None:
    found = shares(num_systems, num_seeds, spread, 300, "s0")
    for kind in ("set", "to best", "against", "pairs"):
        assert found[kind] > 0.915, kind  # 0.95 minus three standard errors of 300 tables


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(("num_systems", "num_seeds"), [(2, 3), (4, 3), (12, 3), (12, 5), (12, 11)])
@pytest.mark.parametrize("reference", [None, "s1"])
def test_sets_and_intervals_hold_the_truth_as_often_as_the_page_says(
    num_systems: int, num_seeds: int, spread: float, reference: str | None
) -> None:
    found = shares(num_systems, num_seeds, spread, 2000, reference)
    for kind in ("set", "to best", "against", "pairs"):
        assert found[kind] > 0.935, kind


def test_intervals_of_single_differences_would_not_hold_all_at_once() -> None:
    """The former method: the best of twelve as the reference, and a separate 95 % interval for each difference."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        noise = rng.normal(0, 1, (10, 12))
        gaps = noise - noise[:, [noise.mean(axis=0).argmax()]]
        half = stats.t.ppf(0.975, 9) * gaps.std(axis=0, ddof=1) / 10**0.5
        held += (np.abs(gaps.mean(axis=0)) <= half).all()
    assert held / 300 < 0.6


def test_a_set_without_the_correction_would_miss_the_best() -> None:
    """One-sided tests at 0.05 each of twelve equal systems: each of them is a best one, and is excluded too often."""
    rng, missed = np.random.default_rng(1), 0
    for _ in range(300):
        noise = rng.normal(0, 1, (10, 12))
        missed += (stats.ttest_rel(noise[:, 1:], noise[:, :1], alternative="greater").pvalue < 0.05).any()
    assert missed / 300 > 0.15


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("num_queries", [50, 500])
def test_coarse_scores_of_few_seeds_exclude_no_best_system_by_an_accident_of_equal_differences(num_queries: int) -> None:
    """Each of six equal systems is a best one: the set contains each with 95 % probability, not all of them together."""
    rng, excluded = np.random.default_rng(6), Counter[str]()
    for _ in range(1000):
        found = rng.binomial(num_queries, 0.5, (3, 6)) / num_queries
        table = {f"s{k}": dict(enumerate((100 * found[:, k]).tolist())) for k in range(6)}
        excluded.update(table.keys() - set(compared(table, num_queries=num_queries).best_set))
    assert max(excluded.values(), default=0) / 1000 < 0.05
