"""Evaluate a run for its page: scores with intervals, worst queries, confused classes and a map. The evaluator computes all numbers.

Shapes: Q queries, D dimensions, L selectable queries, P points of the map.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dml_core.errors import StoreError
from dml_core.evaluation.metric_info import table_columns
from dml_core.evaluation.retrieval.metrics import per_query_metrics
from dml_core.evaluation.retrieval.outcomes import (
    ConfusedPair,
    QueryOutcomes,
    confused_pairs,
    query_outcomes,
    sample_queries,
    worst_queries,
)
from dml_core.evaluation.statistics.confidence import Summary, interval_over_units
from tasks.reports.look.album import Album
from tasks.reports.look.runs import FinishedRun
from tasks.scores.figures import Side

NUM_NEIGHBOURS = 8
MAX_POINTS = 2000
NUM_WORST = 12
NUM_PAIRS, NUM_EXAMPLES = 8, 3
NUM_COUNTED_PAIRS = 200  # of the table of pairs without pictures
ALBUM_BYTES = 3_000_000
NUM_BEFORE_TSNE = 50  # dimensions that PCA keeps for t-SNE
Method = Literal["tsne", "pca"]


@dataclass(frozen=True)
class Score:
    """A metric of a run, as fractions: value, 95 % intervals over resampled queries and classes, and summary over the variant's seeds."""

    metric: str
    value: float
    over_queries: tuple[float, float] | None
    over_classes: tuple[float, float] | None
    over_seeds: Summary


@dataclass(frozen=True)
class Shot:
    """A picture with its caption.

    Attributes:
        place: in the album.
        name: name of its class.
        number: index in its role.
        file: name in the raw dataset.
        similarity: to the query; None for the query itself.
        is_right: whether it is of the query's class.
    """

    place: int
    name: str
    number: int
    file: str
    similarity: float | None = None
    is_right: bool = True


@dataclass(frozen=True)
class Found:
    """A query with its nearest neighbours, the rank of the first correct one, and the number of correct images."""

    query: Shot
    neighbours: tuple[Shot, ...]
    first_rank: int
    num_positives: int


@dataclass(frozen=True)
class Confusion:
    """Number of queries of a class that are nearest to another class, with examples: queries and their nearest neighbours."""

    name: str
    taken_for: str
    num_missed: int
    num_queries: int
    examples: tuple[tuple[Shot, Shot], ...]


@dataclass(frozen=True)
class EvaluatedRun:
    """A run with the outcomes of its queries and their positions on a map.

    Attributes:
        queries, gallery: its images; one object if the queries are also the gallery.
        points: (P, 2), or None if there are too few.
        drawn: (P,) the queries that the points show.
    """

    run: FinishedRun
    queries: Side
    gallery: Side
    outcomes: QueryOutcomes
    points: NDArray[np.float64] | None
    drawn: NDArray[np.int64]

    @property
    def num_scored(self) -> int:
        """Number of queries with something to find."""
        return int(self.outcomes.scores.is_scored.sum())

    @property
    def num_found(self) -> int:
        """Number of queries whose nearest image is correct."""
        return int(self.outcomes.is_found.sum())


def evaluate_run(run: FinishedRun, queries: Side, gallery: Side, looked: NDArray[np.int64], method: Method) -> EvaluatedRun:
    """Evaluate a finished run for its page.

    Args:
        run: run with its scores.
        queries, gallery: its images with their embeddings.
        looked: (L,) the queries of which the map shows some.
        method: method of the map.

    Raises:
        EvaluationError: the embeddings cannot be scored.
        StoreError: the scores do not match the embeddings.
    """
    config, is_self = run.spec.evaluation, queries is gallery
    asked = () if is_self else (queries.embeddings, queries.labels)
    outcomes = query_outcomes(gallery.embeddings, gallery.labels, config, NUM_NEIGHBOURS, *asked)
    for name, values in per_query_metrics(outcomes.scores, config.recall_at).items():
        if name in run.metrics and abs(run.metrics[name] - values.mean()) > 1e-9:
            raise StoreError(
                f"{run.scores}: {name} is {run.metrics[name]:.6f}, but {values.mean():.6f} by the embeddings; make {run.spec.title} anew"
            )
    drawn = looked[sample_queries(queries.labels[looked], MAX_POINTS, run.spec.seed)]
    can_map = len(drawn) >= 5 and queries.embeddings.shape[1] >= 2
    points = project(queries.embeddings[drawn], config.metric, method, run.spec.seed) if can_map else None
    return EvaluatedRun(run, queries, gallery, outcomes, points, drawn)


def project(embeddings_PD: NDArray[Any], metric: str, method: Method, seed: int) -> NDArray[np.float64]:
    """Return (P, 2) positions on a map; t-SNE starts from the first two principal components.

    t-SNE uses one thread: several would sum in a varying order, and wait for each other on a busy machine.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    values_PD = embeddings_PD.astype(np.float64)
    if metric == "cosine":
        values_PD = values_PD / np.linalg.norm(values_PD, axis=1, keepdims=True)
    reduced: NDArray[np.float64] = PCA(min(NUM_BEFORE_TSNE, *values_PD.shape), random_state=seed).fit_transform(values_PD)
    spread = float(reduced[:, 0].std())
    if method == "pca" or spread < 1e-9:  # all points coincide: nothing to spread out
        return reduced[:, :2]
    start = reduced[:, :2] / spread * 1e-4
    perplexity = min(30.0, (len(values_PD) - 1) / 3)
    with threadpool_limits(1):
        found: NDArray[np.float64] = TSNE(2, perplexity=perplexity, init=start, random_state=seed).fit_transform(reduced)
    return found


def scores_of(evaluated: EvaluatedRun, over_seeds: dict[str, Summary]) -> list[Score]:
    """Return every metric that tables show, with its intervals; metrics that are not means over queries have only that over seeds."""
    config, outcomes = evaluated.run.spec.evaluation, evaluated.outcomes
    columns = table_columns(evaluated.run.metrics)
    values = {name: column for name, column in per_query_metrics(outcomes.scores, config.recall_at).items() if name in columns}
    values_SM = np.stack(list(values.values()), axis=1)
    labels_S = evaluated.queries.labels[outcomes.scores.is_scored]
    intervals = []
    for units_S in (np.arange(len(labels_S)), labels_S):
        ends = np.stack(interval_over_units(values_SM, units_S), axis=1)
        intervals.append({name: (float(low), float(high)) for name, (low, high) in zip(values, ends, strict=True) if low < high})
    return [Score(name, evaluated.run.metrics[name], intervals[0].get(name), intervals[1].get(name), over_seeds[name]) for name in columns]


def worst(evaluated: EvaluatedRun, album: Album) -> list[Found]:
    """Return the queries whose first correct image is ranked last, with their nearest neighbours."""
    outcomes = evaluated.outcomes
    return [
        Found(
            shot(album, evaluated.queries, query),
            tuple(
                shot(album, evaluated.gallery, index, float(similarity), bool(is_right))
                for index, similarity, is_right in zip(
                    outcomes.neighbours[query], outcomes.similarities[query], outcomes.is_right[query], strict=True
                )
            ),
            int(outcomes.scores.first_rank[query]),
            int(outcomes.scores.num_positives[query]),
        )
        for query in worst_queries(outcomes, NUM_WORST)
        if outcomes.scores.first_rank[query] > 1
    ]


def confusions(evaluated: EvaluatedRun, album: Album) -> list[Confusion]:
    """Return the confused pairs of classes, the most frequent first; the first ones with pictures."""
    pairs = confused_pairs(evaluated.outcomes, evaluated.gallery.labels, evaluated.queries.labels)[:NUM_COUNTED_PAIRS]
    return [_confusion(evaluated, album, pair, NUM_EXAMPLES if number < NUM_PAIRS else 0) for number, pair in enumerate(pairs)]


def _confusion(evaluated: EvaluatedRun, album: Album, pair: ConfusedPair, num_examples: int) -> Confusion:
    names = evaluated.gallery.dataset.class_names
    outcomes = evaluated.outcomes
    examples = tuple(
        (
            shot(album, evaluated.queries, query),
            shot(album, evaluated.gallery, int(outcomes.neighbours[query, 0]), float(outcomes.similarities[query, 0]), False),
        )
        for query in pair.queries[:num_examples]
    )
    return Confusion(names[pair.label], names[pair.taken_for], len(pair.queries), pair.num_queries, examples)


def shot(album: Album, side: Side, index: int, similarity: float | None = None, is_right: bool = True) -> Shot:
    """Add a picture to the album."""
    images = side.dataset
    return Shot(album.place(side, index), side.class_name(index), int(index), images.paths[int(index)], similarity, is_right)
