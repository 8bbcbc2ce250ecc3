"""What became of every query: its scores as the evaluator counts them, its nearest neighbours, and which class is taken for which.

Ranks are the evaluator's, where a tie never helps. Lists of neighbours put equally near items in the order of their index; here wrong ones
come before right ones among those, so that a list begins with a wrong item where the evaluator counts the query as missed. The exception
is a query with more equally near items than were asked for: then no wrong one may be among those listed, and it is in no class pair.

Shapes: N gallery items, Q queries, D dimensions, k neighbours.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.geometry import as_points
from dml_core.evaluation.inputs import checked_embeddings, label_codes
from dml_core.evaluation.neighbours import nearest
from dml_core.evaluation.retrieval import QueryScores
from dml_core.evaluation.sweep import Resources, Shard, score_queries
from dml_core.evaluation.tiles import usable_device

NUM_SPARE_NEIGHBOURS = 8  # looked at beyond those that are listed, for wrong ones among the equally near


@dataclass(frozen=True)
class QueryOutcomes:
    """What became of each query.

    Attributes:
        scores: ranks and precisions, as every metric is made of them.
        neighbours: (Q, k) gallery indices, nearest first.
        similarities: (Q, k) cosines, or negative distances.
        is_right: (Q, k), whether the neighbour is of the query's class.
    """

    scores: QueryScores
    neighbours: NDArray[np.int64]
    similarities: NDArray[np.float32]
    is_right: NDArray[np.bool_]

    @property
    def is_found(self) -> NDArray[np.bool_]:
        """(Q,) queries whose nearest item is of their class: Recall@1 is their share of the scored queries."""
        found: NDArray[np.bool_] = self.scores.is_scored & (self.scores.first_rank == 1)
        return found

    @property
    def is_missed(self) -> NDArray[np.bool_]:
        """(Q,) scored queries whose nearest item is of another class."""
        missed: NDArray[np.bool_] = self.scores.is_scored & (self.scores.first_rank > 1)
        return missed


@dataclass(frozen=True)
class ConfusedPair:
    """A class whose queries are nearest to items of another.

    Attributes:
        label: of the queries.
        taken_for: label of their nearest neighbours.
        queries: which, those that are most like their neighbour first.
        num_queries: scored queries of the class.
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
) -> QueryOutcomes:
    """Scores and nearest neighbours of every query.

    Args:
        embeddings: (N, D), the gallery, and the queries too where none are given.
        labels: (N,).
        config: metric, memory and device.
        num_neighbours: k; fewer where the gallery has not as many.
        query_embeddings: (Q, D).
        query_labels: (Q,).

    Raises:
        EvaluationError: embeddings or labels that cannot be scored.
    """
    is_self = query_embeddings is None or query_labels is None
    queries_QD = embeddings if query_embeddings is None else query_embeddings
    labels_Q = labels if query_labels is None else query_labels
    codes_N, codes_Q = label_codes([labels, labels_Q])[1]
    gallery = Shard(lambda: as_points(checked_embeddings(embeddings), config.metric), codes_N, 0)
    scores = score_queries(
        [gallery],
        as_points(checked_embeddings(queries_QD, "query embeddings"), config.metric),
        codes_Q,
        np.arange(len(labels)) if is_self else None,
        Resources(config.max_block_bytes, usable_device(config.device)),
    )
    num_listed = min(num_neighbours, len(labels) - is_self)
    num_looked_at = min(num_listed + NUM_SPARE_NEIGHBOURS, len(labels) - is_self)
    neighbours, similarities = nearest(embeddings, queries_QD, num_looked_at, is_self, config.metric, config.device)
    is_right = codes_N[neighbours] == codes_Q[:, None]
    order = np.lexsort((neighbours, is_right, -similarities))[:, :num_listed]
    return QueryOutcomes(scores, *(np.take_along_axis(values, order, axis=1) for values in (neighbours, similarities, is_right)))


def confused_pairs(outcomes: QueryOutcomes, labels: NDArray[np.int64], query_labels: NDArray[np.int64]) -> list[ConfusedPair]:
    """Which class is taken for which, counted over the missed queries' nearest neighbours; the most frequent first, then by label.

    Args:
        outcomes: of the queries.
        labels: (N,) of the gallery.
        query_labels: (Q,).
    """
    missed = np.flatnonzero(outcomes.is_missed & ~outcomes.is_right[:, 0])
    missed = missed[np.argsort(-outcomes.similarities[missed, 0], kind="stable")]
    if not len(missed):
        return []
    pairs, which = np.unique(np.stack([query_labels[missed], labels[outcomes.neighbours[missed, 0]]], axis=1), axis=0, return_inverse=True)
    sizes = dict(zip(*np.unique(query_labels[outcomes.scores.is_scored], return_counts=True), strict=True))
    found = [
        ConfusedPair(int(label), int(taken_for), missed[which.ravel() == number], int(sizes[label]))
        for number, (label, taken_for) in enumerate(pairs)
    ]
    return sorted(found, key=lambda pair: -len(pair.queries))


def worst_queries(outcomes: QueryOutcomes, num_queries: int) -> NDArray[np.int64]:
    """The scored queries whose first right item comes last; of equals the one with the lower average precision, then the lower index."""
    scored = np.flatnonzero(outcomes.scores.is_scored)
    scores = outcomes.scores
    order = np.lexsort((scored, scores.average_precision[scored], -scores.first_rank[scored]))
    return scored[order][:num_queries]


def sample_queries(labels: NDArray[np.int64], num_queries: int, seed: int) -> NDArray[np.int64]:
    """(L,) rising indices of at most so many queries: all, or of classes in a random order an equal share of each, two at least."""
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
