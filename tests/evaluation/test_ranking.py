"""Counting ranks, by hand: two queries, of three positives (at 1, 3, 3) and of two (at 2, 5)."""

import numpy as np

from dml_core.evaluation.retrieval.ranking import RankCounter

BOTH = slice(0, 2)


def counter() -> RankCounter:
    return RankCounter(np.array([1, 3, 3, 2, 5], dtype=np.float32), np.array([3, 2]))


def test_an_item_goes_before_the_first_positive_that_is_not_nearer() -> None:
    queries = np.array([0, 0, 0, 0, 1, 1, 1])
    points = counter().insertion_points(BOTH, queries, np.array([0, 2, 3, 4, 2, 3, 6], dtype=np.float32))
    assert points.tolist() == [0, 1, 1, 3, 3, 4, 5]
    assert counter().insertion_points(slice(1, 2), queries[4:], np.array([2, 3, 6], dtype=np.float32)).tolist() == [3, 4, 5]


def test_a_positive_at_the_insertion_point_is_nearer_only_if_it_is_the_query_s_own() -> None:
    queries, points = np.array([0, 0, 0, 1, 1, 1]), np.array([1, 1, 3, 4, 4, 5])  # 3 and 5: past the last
    assert counter().are_nearer(points, queries, np.array([3, 3.5, 9, 5, 6, 9], dtype=np.float32)).tolist() == [0, 1, 0, 0, 1, 0]


def test_scores_of_negatives_taken_in() -> None:
    """Query 0 has no negative before its first positive, one before its second: ranks 1, 3, 4. Query 1 has two before its first: 3, 4."""
    ranks = counter()
    ranks.add(BOTH, np.array([0, 2]), np.array([0]), np.array([1]))
    first, average_precision, r_precision = ranks.scores()
    assert first.tolist() == [1, 3]
    np.testing.assert_allclose(average_precision, [(1 / 1 + 2 / 3) / 3, 0])
    np.testing.assert_allclose(r_precision, [2 / 3, 0])
    assert [bound.tolist() for bound in ranks.bounds(BOTH)] == [[1, 2], [3, 2]]  # useless beyond R, but never all of them
