"""Ranks over datasets and seeds by hand and beside scipy."""

import numpy as np
import pytest
from scipy import stats

from dml_core.evaluation.mean_ranks import alike, rank_systems


def scores_of(matrix: list[list[float]]) -> dict[str, dict[int, float]]:
    """A row a system, a column a seed."""
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


def test_over_datasets_a_block_is_the_mean_over_seeds_and_signed_ranks_are_over_both() -> None:
    rng = np.random.default_rng(1)
    data = {f"d{n}": scores_of(rng.normal([[9], [8], [7]], 0.4, (3, 4)).tolist()) for n in range(5)}
    found = rank_systems("recall@1", data)
    assert found is not None
    assert (found.over, found.blocks) == ("datasets", tuple(data))
    blocks = np.array([[np.mean(list(by_seed.values())) for by_seed in of.values()] for of in data.values()])
    assert found.p_value == pytest.approx(stats.friedmanchisquare(*blocks.T).pvalue)
    pair = found.signed_ranks[0]
    flat = [np.concatenate([list(of[name].values()) for of in data.values()]) for name in (pair.system, pair.other)]
    assert (pair.num_blocks, pair.p_value) == (20, pytest.approx(stats.wilcoxon(*flat).pvalue))
    assert pair.p_holm >= pair.p_value
    assert found.sentence.startswith("By ranks of R@1 over 5 datasets, s0 is first (mean rank 1); systems differ (Friedman, p = ")


def test_groups_are_the_largest_within_the_critical_difference_by_hand() -> None:
    ranks = {"a": 1.0, "b": 1.9, "c": 2.5, "d": 4.0, "e": 5.6}
    assert alike(ranks, 1.5) == (("a", "b", "c"), ("c", "d"))
    assert alike(ranks, 0.5) == ()
    assert alike(ranks, 9.0) == (("a", "b", "c", "d", "e"),)


def test_fewer_than_three_systems_or_two_blocks_have_no_ranks() -> None:
    assert rank_systems("nmi", {"d": scores_of([[1, 2], [2, 3]])}) is None
    assert rank_systems("nmi", {"d": scores_of([[1], [2], [3]])}) is None
    assert rank_systems("nmi", {}) is None
    found = rank_systems("nmi", {"d": scores_of([[1, 2], [2, 3], [3, 4], [9]])})
    assert found is not None
    assert "s3" not in found.mean_ranks, "one seed of one dataset is no block for the others"
    without = {"d": scores_of([[1, 2], [2, 3], [3, 4]]), "e": scores_of([[1, 2], [2, 3]])}
    assert rank_systems("nmi", without) is None, "only systems that every dataset has are ranked"
