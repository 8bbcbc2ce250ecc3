"""Ranks over datasets and seeds, by hand and compared with SciPy, and the false positive rate for equal systems."""

import numpy as np
import pytest
from scipy import stats

from dml_core.evaluation.statistics.mean_ranks import alike, compare_ranks, rank_systems


def scores_of(matrix: list[list[float]]) -> dict[str, dict[int, float]]:
    """Return scores of a matrix with a row per system and a column per seed."""
    return {f"s{k}": dict(enumerate(values)) for k, values in enumerate(matrix)}


def test_over_seeds_of_one_dataset_it_is_friedmans_test_and_it_says_so() -> None:
    matrix = np.random.default_rng(0).normal([[3], [2.5], [0]], 0.5, (3, 8))
    found = rank_systems("recall@1", {"d": scores_of(matrix.tolist())})
    assert found is not None
    assert found.over == "seeds"
    assert len(found.blocks) == 8
    assert found.p_value == pytest.approx(stats.friedmanchisquare(*matrix).pvalue)
    ranks = stats.rankdata(-matrix, axis=0).mean(axis=1)
    assert found.mean_ranks == pytest.approx({f"s{k}": ranks[k] for k in range(3)})
    assert "over 8 seeds of one dataset" in found.sentence


def test_over_datasets_a_block_is_the_mean_over_seeds() -> None:
    rng = np.random.default_rng(1)
    data = {f"d{n}": scores_of(rng.normal([[9], [8], [7]], 0.4, (3, 4)).tolist()) for n in range(5)}
    found = rank_systems("recall@1", data)
    assert found is not None
    assert (found.over, found.blocks) == ("datasets", tuple(data))
    blocks = np.array([[np.mean(list(by_seed.values())) for by_seed in of.values()] for of in data.values()])
    assert found.p_value == pytest.approx(stats.friedmanchisquare(*blocks.T).pvalue)
    assert found.sentence.startswith("By ranks of R@1 over 5 datasets, s0 is first (mean rank 1); systems differ (Friedman, p = ")


def test_a_block_is_a_mean_and_no_other_summary() -> None:
    """The means are 4, 5 and 4.5; the largest and the smallest values are in other orders."""
    scores = scores_of([[9, 1, 2], [5, 4, 6], [4.5, 4.5, 4.5]])
    found = rank_systems("recall@1", {"d": scores, "e": scores})
    assert found is not None
    assert found.mean_ranks == {"s1": 1.0, "s2": 2.0, "s0": 3.0}


def test_a_block_has_the_seeds_that_all_systems_have() -> None:
    """On `d`, s2 has one seed, on which s0 is best; the other seeds of s0 and s1 would make s0 the worst."""
    unequal = {"s0": {0: 9.0, 1: 0.0, 2: 0.0}, "s1": {0: 8.0, 1: 8.0, 2: 8.0}, "s2": {0: 7.0}}
    found = rank_systems("recall@1", {"d": unequal, "e": scores_of([[3], [2], [1]])})
    assert found is not None
    assert found.mean_ranks == {"s0": 1.0, "s1": 2.0, "s2": 3.0}
    no_shared = {"s0": {0: 9.0}, "s1": {1: 8.0}, "s2": {0: 7.0}}
    assert rank_systems("recall@1", {"d": no_shared, "e": scores_of([[3], [2], [1]])}) is None, "without a shared seed there is no block"


def test_equal_means_share_a_rank_whatever_the_order_of_their_values() -> None:
    """0.1 + 0.2 + 0.3 is above 0.3 + 0.2 + 0.1 in floating point."""
    scores = scores_of([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.0, 0.0, 0.0]])
    found = rank_systems("recall@1", {"d": scores, "e": scores})
    assert found is not None
    assert found.mean_ranks == {"s0": 1.5, "s1": 1.5, "s2": 3.0}


def test_groups_are_the_largest_within_the_critical_difference_by_hand() -> None:
    ranks = {"a": 1.0, "b": 1.9, "c": 2.5, "d": 4.0, "e": 5.6}
    assert alike(ranks, 1.5) == (("a", "b", "c"), ("c", "d"))
    assert alike(ranks, 0.5) == ()
    assert alike(ranks, 9.0) == (("a", "b", "c", "d", "e"),)


def test_two_seeds_of_one_dataset_decide_nothing() -> None:
    """Twelve systems in the same order twice would be a significant difference (Friedman, p = 0.04)."""
    two = [[90 - k, 90.5 - k] for k in range(12)]
    assert rank_systems("recall@1", {"d": scores_of(two)}) is None
    assert rank_systems("recall@1", {"d": scores_of([[*of, of[0]] for of in two])}) is not None
    assert rank_systems("recall@1", {"d": scores_of(two), "e": scores_of(two)}) is not None, "datasets are blocks, not seeds"


def test_systems_that_share_the_lowest_rank_are_all_first() -> None:
    high, low = [60.0 + seed for seed in range(6)], [50.0 + seed for seed in range(6)]
    for matrix, says in (
        ([high, high, high], "over 6 seeds of one dataset, all are equal (mean rank 2); Friedman's test finds no significant difference"),
        ([low, high, high], ", s1 and s2 are first (mean rank 1.5); systems differ (Friedman, p = 0.0025), and the other lies more than"),
        ([high, low, high, low], ", s0 and s2 are first (mean rank 1.5); systems differ (Friedman, p = 0.00044), and 2 of the other 2 lie"),
    ):
        found = rank_systems("recall@1", {"d": scores_of(matrix)})
        assert found is not None
        assert says in found.sentence


def test_a_dataset_of_few_systems_takes_no_ranks_from_the_others() -> None:
    full = {f"d{n}": scores_of([[80.0 - 5 * k] for k in range(5)]) for n in range(3)}
    found = rank_systems("recall@1", full)
    assert found is not None
    assert len(found.mean_ranks) == 5
    assert rank_systems("recall@1", {"more": scores_of([[90.0]])} | full) == found
    assert rank_systems("recall@1", {"more": scores_of([[90.0], [80.0]])} | full) == found
    assert rank_systems("recall@1", {"more": scores_of([[90.0]]), "d": full["d0"]}) is None, "one dataset remains"


def test_fewer_than_three_systems_or_two_blocks_have_no_ranks() -> None:
    assert rank_systems("nmi", {"d": scores_of([[1, 2], [2, 3]])}) is None
    assert rank_systems("nmi", {"d": scores_of([[1], [2], [3]])}) is None
    assert rank_systems("nmi", {}) is None
    found = rank_systems("nmi", {"d": scores_of([[1, 2, 3], [2, 3, 4], [3, 4, 5], [9, 9]])})
    assert found is not None
    assert "s3" not in found.mean_ranks, "fewer seeds of one dataset are no blocks for the others"
    without = {"d": scores_of([[1, 2], [2, 3], [3, 4]]), "e": scores_of([[1, 2], [2, 3]])}
    assert rank_systems("nmi", without) is None, "only systems that every dataset has are ranked"


MORE = [pytest.param(*sizes, marks=[pytest.mark.slow, pytest.mark.proof]) for sizes in ((5, 5, 3), (2, 10, 6), (8, 3, 8))]


def null_scores(rng: np.random.Generator, num_datasets: int, num_seeds: int, num_systems: int) -> dict[str, dict[str, dict[int, float]]]:
    """Return scores of systems that are equal over all possible datasets, but differ on each by more than between seeds."""
    of_dataset, of_seed = rng.normal(0, 1, (num_datasets, num_systems, 1)), rng.normal(0, 0.3, (num_datasets, num_systems, num_seeds))
    return {f"d{n}": scores_of(values.tolist()) for n, values in enumerate(of_dataset + of_seed)}


@pytest.mark.parametrize(("num_datasets", "num_seeds", "num_systems"), [(3, 10, 4), (1, 10, 4), *MORE])
def test_equal_systems_are_found_to_differ_no_more_often_than_one_time_in_twenty(
    num_datasets: int, num_seeds: int, num_systems: int
) -> None:
    """For any number of seeds; with pairs of dataset and seed as blocks, the rate was 57 of 100 (3 datasets, 10 seeds).

    0.05 plus three standard errors of 600 tables is 0.077. With one dataset, the systems are equal on it, not on other datasets.
    """
    rng, wrong_p, wrong_groups = np.random.default_rng(num_datasets * num_systems), 0, 0
    for _ in range(600):
        drawn = null_scores(rng, num_datasets, num_seeds, num_systems)
        if num_datasets == 1:
            drawn = {"d": scores_of(rng.normal(0, 1, (num_systems, num_seeds)).tolist())}
        found = rank_systems("nmi", drawn)
        assert found is not None
        wrong_p += found.p_value < 0.05
        wrong_groups += found.groups != (tuple(found.mean_ranks),)
    assert wrong_p / 600 < 0.077
    assert wrong_groups / 600 < 0.077


def test_seeds_of_one_dataset_for_blocks_would_find_differences_where_there_are_none() -> None:
    """Simulates pairs of dataset and seed as blocks."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(200):
        drawn = null_scores(rng, 3, 10, 4)
        merged = {name: dict(enumerate(score for of in drawn.values() for score in of[name].values())) for name in drawn["d0"]}
        found = rank_systems("nmi", {"d": merged})
        wrong += found is not None and found.p_value < 0.05
    assert wrong / 200 > 0.3


def test_ranks_are_friedmans_and_the_distance_is_nemenyis_table() -> None:
    scores = np.random.default_rng(3).random((9, 4))
    scores[0, :2] = 0.5  # a tie
    mean_ranks, p_value, critical_difference = compare_ranks(scores)
    assert p_value == pytest.approx(stats.friedmanchisquare(*scores.T).pvalue)
    assert sum(mean_ranks) == pytest.approx(10)
    # Demsar's table 5: q is 2.569 for four systems; sqrt(4 * 5 / (6 * 9))
    assert critical_difference == pytest.approx(2.569 * np.sqrt(20 / 54), rel=1e-3)
    best = np.full((5, 3), [0.9, 0.5, 0.1])
    assert compare_ranks(best)[0].tolist() == [1.0, 2.0, 3.0]
    assert compare_ranks(np.ones((3, 3)))[1] == 1.0
