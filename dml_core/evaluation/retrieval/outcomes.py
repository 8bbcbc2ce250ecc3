"""Retrieval results of single queries: scores, nearest neighbours, and confusions between classes.

Ranks are the evaluator's, in which a tie never helps. Neighbours at the same distance are ordered by index, except that wrong ones come
before right ones, so that a list begins with a wrong item if the evaluator counts the query as missed. The exception is a query with more
ties than requested neighbours: its list may contain no wrong one, and it is in no class pair.

Shapes: N gallery items, Q queries, D dimensions, k neighbours.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.inputs import checked_embeddings, checked_labels, label_codes
from dml_core.evaluation.retrieval.geometry import as_points, squared_distances
from dml_core.evaluation.retrieval.metrics import QueryScores
from dml_core.evaluation.retrieval.neighbours import nearest
from dml_core.evaluation.retrieval.sweep import Shard, score_queries
from dml_core.evaluation.retrieval.tiles import usable_device

NUM_SPARE_NEIGHBOURS = 8  # neighbours beyond those listed, searched for wrong ones among ties


@dataclass(frozen=True)
class QueryOutcomes:
    """Retrieval results of each query.

    Attributes:
        scores: ranks and precisions, from which every metric is computed.
        neighbours: (Q, k) gallery indices, nearest first.
        similarities: (Q, k) cosines, or negative distances.
        is_right: (Q, k), True if the neighbour has the query's class.
    """

    scores: QueryScores
    neighbours: NDArray[np.int64]
    similarities: NDArray[np.float32]
    is_right: NDArray[np.bool_]

    @property
    def is_found(self) -> NDArray[np.bool_]:
        """(Q,) queries whose nearest item has their class: Recall@1 is their share of the scored queries."""
        return self.scores.is_scored & (self.scores.first_rank == 1)


@dataclass(frozen=True)
class ConfusedPair:
    """A class whose queries are nearest to items of another.

    Attributes:
        label: label of the queries.
        taken_for: label of their nearest neighbours.
        queries: indices of the queries, most similar to their neighbour first.
        num_queries: number of scored queries of the class.
    """

    label: int
    taken_for: int
    queries: NDArray[np.int64]
    num_queries: int


def query_outcomes(
    embeddings: NDArray[Any],
    labels: NDArray[np.int64],
    config: EvaluationConfig,
    num_neighbours: int,
    query_embeddings: NDArray[Any] | None = None,
    query_labels: NDArray[np.int64] | None = None,
    sample: NDArray[np.int64] | None = None,
) -> QueryOutcomes:
    """Return scores and nearest neighbours of every query, or of some.

    Args:
        embeddings: (N, D), the gallery, and also the queries if none are given.
        labels: (N,).
        config: metric, memory and device.
        num_neighbours: k; fewer if the gallery is smaller.
        query_embeddings: (Q, D).
        query_labels: (Q,).
        sample: rising indices of the queries to look at; None for all. The result has only these.

    Raises:
        EvaluationError: embeddings or labels cannot be scored.
    """
    is_self = query_embeddings is None or query_labels is None
    queries_QD = embeddings if query_embeddings is None else query_embeddings
    labels_Q = labels if query_labels is None else query_labels
    which = np.arange(len(labels_Q)) if sample is None else sample
    queries_QD, labels_Q = queries_QD[which], labels_Q[which]
    points, query_points = (as_points(checked_embeddings(rows), config.metric) for rows in (embeddings, queries_QD))
    _, (codes_N, codes_Q) = label_codes([checked_labels(labels, len(points)), checked_labels(labels_Q, len(query_points))])
    self_index_Q, device = which if is_self else None, usable_device(config.device)
    scores = score_queries([Shard(lambda: points, codes_N)], query_points, codes_Q, self_index_Q, config.max_block_bytes, device)
    num_listed = min(num_neighbours, len(labels) - is_self)
    num_looked_at = min(num_listed + NUM_SPARE_NEIGHBOURS, len(labels) - is_self)
    neighbours, similarities = nearest(points, query_points, num_looked_at + is_self, config.device)
    if is_self:
        is_other = neighbours != which[:, None]
        is_other[is_other.all(axis=1), -1] = False  # the query is not among its neighbours if many others are equally near
        neighbours, similarities = (array[is_other].reshape(-1, num_looked_at) for array in (neighbours, similarities))
    is_right = labels[neighbours] == labels_Q[:, None]
    pairs = neighbours.ravel(), np.arange(len(which)).repeat(num_looked_at)
    distances = squared_distances(points, pairs[0], query_points, pairs[1]).reshape(neighbours.shape)  # similarities tie too often
    order = np.lexsort((neighbours, is_right, distances))[:, :num_listed]
    return QueryOutcomes(scores, *(np.take_along_axis(values, order, axis=1) for values in (neighbours, similarities, is_right)))


def confused_pairs(outcomes: QueryOutcomes, labels: NDArray[np.int64], query_labels: NDArray[np.int64]) -> list[ConfusedPair]:
    """Return the confused class pairs, counted over the missed queries' nearest neighbours; most frequent first, then by label."""
    missed = np.flatnonzero(outcomes.scores.is_scored & ~outcomes.is_found & ~outcomes.is_right[:, 0])
    missed = missed[np.argsort(-outcomes.similarities[missed, 0], kind="stable")]
    if not len(missed):
        return []
    pairs, which = np.unique(np.stack([query_labels[missed], labels[outcomes.neighbours[missed, 0]]], axis=1), axis=0, return_inverse=True)
    sizes = dict(zip(*np.unique(query_labels[outcomes.scores.is_scored], return_counts=True), strict=True))
    confused = [
        ConfusedPair(int(label), int(taken_for), missed[which.ravel() == number], int(sizes[label]))
        for number, (label, taken_for) in enumerate(pairs)
    ]
    return sorted(confused, key=lambda pair: -len(pair.queries))


def worst_queries(outcomes: QueryOutcomes, num_queries: int) -> NDArray[np.int64]:
    """Return the scored queries with the largest rank of the first right item; ties by lower average precision, then lower index."""
    scored = np.flatnonzero(outcomes.scores.is_scored)
    scores = outcomes.scores
    order = np.lexsort((scored, scores.average_precision[scored], -scores.first_rank[scored]))
    return scored[order][:num_queries]


def sample_queries(labels: NDArray[np.int64], num_queries: int, seed: int) -> NDArray[np.int64]:
    """Return (L,) rising indices of at most `num_queries`: all, or equal shares of random classes, at least two but of the last."""
    if len(labels) <= num_queries:
        return np.arange(len(labels))
    generator = np.random.default_rng(seed)
    classes = generator.permutation(np.unique(labels))
    share = max(2, num_queries // len(classes))
    shuffled = generator.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = np.searchsorted(labels[by_class], classes)
    ends = np.searchsorted(labels[by_class], classes, side="right")
    chosen = np.concatenate([by_class[start : min(end, start + share)] for start, end in zip(starts, ends, strict=True)])
    return np.sort(chosen[:num_queries])
