"""Outcomes of each query, compared with loops over all pairs in float64 that share no code with the evaluator."""

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dml_core.config import parse
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate
from dml_core.evaluation.retrieval.outcomes import QueryOutcomes, confused_pairs, query_outcomes, sample_queries, worst_queries

CONFIG = parse(EvaluationConfig, {"clustering": False}, "test")
EUCLIDEAN = parse(EvaluationConfig, {"clustering": False, "metric": "euclidean"}, "test")
Array = NDArray[Any]


def case(seed: int, num_queries: int | None = None) -> tuple[Array, Array, Array | None, Array | None]:
    """Return 120 items, each of 40 points three times on average, so that many are equally near, of 7 classes, one with a single item."""
    generator = np.random.default_rng(seed)
    points = generator.standard_normal((40, 3)).astype(np.float32)
    gallery = points[generator.integers(0, 40, 120)]
    labels = np.append(generator.integers(0, 6, 119), 6)
    if num_queries is None:
        return gallery, labels, None, None
    return gallery, labels, points[generator.integers(0, 40, num_queries)], generator.integers(0, 8, num_queries)


def brute_force(gallery: Array, labels: Array, queries: Array | None, query_labels: Array | None, metric: str) -> list[dict[str, Any]]:
    """Return for each query all gallery items as (distance, is right, index), sorted: nearest first, wrong before right, then by index."""
    asked, asked_labels = (gallery, labels) if queries is None else (queries, query_labels)
    assert asked_labels is not None
    asked, gallery = asked.astype(float), gallery.astype(float)
    if metric == "cosine":
        asked, gallery = (points / np.linalg.norm(points, axis=1, keepdims=True) for points in (asked, gallery))
    found = []
    for number, (query, label) in enumerate(zip(asked, asked_labels, strict=True)):
        items = []
        for index, item in enumerate(gallery):
            if queries is None and index == number:
                continue
            items.append((round(float(((query - item) ** 2).sum()), 9), bool(labels[index] == label), index))
        items.sort()
        ranks = [rank for rank, item in enumerate(items, start=1) if item[1]]
        found.append({"items": items, "label": int(label), "first": ranks[0] if ranks else None})
    return found


@pytest.mark.parametrize("config", [CONFIG, EUCLIDEAN], ids=lambda config: config.metric)
@pytest.mark.parametrize("num_queries", [None, 40])
def test_ranks_lists_and_pairs_are_those_of_loops_over_all_pairs(config: EvaluationConfig, num_queries: int | None) -> None:
    cases = [(made, brute_force(*made, config.metric)) for made in (case(seed, num_queries) for seed in range(3))]
    for (made, expected), num_neighbours in product(cases, (1, 8, 200)):
        labels, query_labels = made[1], made[1] if made[3] is None else made[3]
        outcomes = query_outcomes(made[0], labels, config, num_neighbours, *made[2:])
        assert [rank if scored else None for rank, scored in zip(outcomes.scores.first_rank, outcomes.scores.is_scored, strict=True)] == [
            one["first"] for one in expected
        ]
        for number, one in enumerate(expected):
            assert outcomes.neighbours[number].tolist() == [item[2] for item in one["items"][:num_neighbours]]
            assert outcomes.is_right[number].tolist() == [item[1] for item in one["items"][:num_neighbours]]
        counted = Counter((one["label"], int(labels[one["items"][0][2]])) for one in expected if one["first"] not in (None, 1))
        pairs = confused_pairs(outcomes, labels, query_labels)
        assert {(pair.label, pair.taken_for): len(pair.queries) for pair in pairs} == counted
        assert [len(pair.queries) for pair in pairs] == sorted(counted.values(), reverse=True)
        for pair in pairs:
            assert pair.num_queries == sum(one["label"] == pair.label and one["first"] is not None for one in expected)
            assert all(expected[query]["label"] == pair.label for query in pair.queries)


def test_found_and_missed_queries_are_recall_at_1_of_the_evaluator() -> None:
    gallery, labels, *_ = case(7)
    outcomes = query_outcomes(gallery, labels, CONFIG, 4)
    metrics = evaluate(gallery, labels, CONFIG)
    num_scored = metrics["num_queries"] - metrics["num_queries_without_positive"]
    assert outcomes.is_found.sum() / num_scored == pytest.approx(metrics["recall@1"], abs=1e-12)
    pairs = confused_pairs(outcomes, labels, labels)
    assert sum(len(pair.queries) for pair in pairs) <= num_scored - outcomes.is_found.sum()


def test_a_right_item_that_is_nearer_by_less_than_a_cosine_shows_comes_first() -> None:
    """Both cosines to the first item are 1 in float32, their distances are not equal."""
    embeddings = np.array([[1, 0], [1, 1e-4], [1, 2e-4], [0, 1]], dtype=np.float32)
    outcomes = query_outcomes(embeddings, np.array([0, 0, 1, 1]), CONFIG, 2)
    assert outcomes.similarities[0].tolist() == [1.0, 1.0]
    assert outcomes.is_found[0]
    assert outcomes.neighbours[0].tolist() == [1, 2]


def test_a_query_among_more_equals_than_are_listed_is_missed_and_in_no_pair() -> None:
    gallery = np.ones((60, 2), dtype=np.float32)
    labels = np.repeat([0, 1], [40, 20])
    outcomes = query_outcomes(gallery, labels, CONFIG, 3)
    assert not outcomes.is_found.any()
    assert confused_pairs(outcomes, labels, labels) == [] or all(
        not outcomes.is_right[pair.queries, 0].any() for pair in confused_pairs(outcomes, labels, labels)
    )


def test_a_perfect_space_confuses_nothing() -> None:
    labels = np.repeat(np.arange(4), 5)
    outcomes = query_outcomes(np.eye(4, dtype=np.float32)[labels], labels, CONFIG, 3)
    assert confused_pairs(outcomes, labels, labels) == []
    assert outcomes.is_found.all()


def test_worst_queries_are_those_whose_first_right_item_comes_last() -> None:
    made = case(3)
    expected = brute_force(*made, "cosine")
    outcomes: QueryOutcomes = query_outcomes(made[0], made[1], CONFIG, 4)
    ranks = [expected[query]["first"] for query in worst_queries(outcomes, 10)]
    assert ranks == sorted((one["first"] for one in expected if one["first"] is not None), reverse=True)[:10]
    assert len(worst_queries(outcomes, 1000)) == outcomes.scores.is_scored.sum()


def test_a_sample_is_spread_over_classes_and_the_same_again() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(50), 40))
    sample = sample_queries(labels, 300, seed=1)
    assert len(sample) == 300 == len(set(sample.tolist()))
    assert sample.tolist() == sorted(sample)
    assert set(Counter(labels[sample].tolist()).values()) == {6}
    assert sample.tolist() == sample_queries(labels, 300, seed=1).tolist()
    assert sample.tolist() != sample_queries(labels, 300, seed=2).tolist()
    many = np.repeat(np.arange(1000), 3)
    assert set(Counter(many[sample_queries(many, 300, seed=0)].tolist()).values()) == {2}
    assert sample_queries(labels, 5000, seed=0).tolist() == list(range(2000))
