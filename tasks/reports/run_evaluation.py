"""Evaluate a run for its page: outcomes of its queries, intervals, worst queries, confused classes and a map.

The evaluator computes all numbers. Shapes: Q queries, D dimensions, L selectable queries, P points of the map.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.errors import EvaluationError, StoreError
from dml_core.evaluation.config import Metric
from dml_core.evaluation.metric_info import table_columns
from dml_core.evaluation.retrieval.metrics import per_query_metrics
from dml_core.evaluation.retrieval.outcomes import ConfusedPair, QueryOutcomes, query_outcomes, sample_queries, worst_queries
from dml_core.evaluation.statistics.confidence import interval_over_units
from dml_core.figures.maps import principal_components
from tasks.reports.album import Album
from tasks.reports.finished_runs import FinishedRun

NUM_NEIGHBOURS = 8
MAX_POINTS = 2000
NUM_WORST = 12
NUM_PAIRS, NUM_EXAMPLES = 8, 3
NUM_BEFORE_TSNE = 50  # dimensions that PCA keeps for t-SNE
Method = Literal["tsne", "pca"]
Intervals = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Shot:
    """A picture with its caption.

    Attributes:
        place: in the album; name: that of its class; number: index in its role; file: name in the raw dataset.
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
class Images:
    """The images of all pages.

    Attributes:
        queries, gallery: one object if the queries are also the gallery.
        selectable: (L,) the queries that can be selected.
        album: album of all of them and their neighbours.
    """

    queries: EmbeddedImages
    gallery: EmbeddedImages
    selectable: NDArray[np.int64]
    album: Album

    @property
    def is_whole(self) -> bool:
        """True if every query can be selected."""
        return len(self.selectable) == len(self.queries.labels)


@dataclass(frozen=True)
class EvaluatedRun:
    """A run with the outcomes of its queries and their positions on a map.

    Attributes:
        images: those of all pages; the run's own embeddings of them, which may be large, are not kept.
        method: method of the map.
        points: (P, 2), or None if there are too few.
        drawn: (P,) the queries that the points show.
    """

    run: FinishedRun
    images: Images
    outcomes: QueryOutcomes
    method: Method
    points: NDArray[np.float64] | None
    drawn: NDArray[np.int64]

    @property
    def variant(self) -> str:
        """Name of the variant in the comparison."""
        return self.run.spec.variant

    @property
    def num_scored(self) -> int:
        """Number of queries with a correct image in the gallery."""
        return int(self.outcomes.scores.is_scored.sum())

    @property
    def num_correct(self) -> int:
        """Number of queries whose nearest image is correct."""
        return int(self.outcomes.is_found.sum())

    def intervals(self) -> tuple[Intervals, Intervals]:
        """Return the 95 % intervals of metrics that are means over queries, as fractions: over queries, and over classes."""
        outcomes, shown = self.outcomes, table_columns(self.run.metrics)
        per_query = per_query_metrics(outcomes.scores, self.run.spec.evaluation.recall_at)
        values = {name: column for name, column in per_query.items() if name in shown}
        labels_S = self.images.queries.labels[outcomes.scores.is_scored]
        return _intervals(values, np.arange(len(labels_S))), _intervals(values, labels_S)

    def worst(self, album: Album) -> list[tuple[Shot, list[Shot], int, int]]:
        """Return the queries whose first correct image is ranked last: nearest neighbours, rank of that image, number of correct ones."""
        scores = self.outcomes.scores
        return [
            (
                _shot(album, self.images.queries, query),
                [self._neighbour(album, query, rank) for rank in range(self.outcomes.neighbours.shape[1])],
                int(scores.first_rank[query]),
                int(scores.num_positives[query]),
            )
            for query in worst_queries(self.outcomes, NUM_WORST)
            if scores.first_rank[query] > 1
        ]

    def examples(self, album: Album, pairs: list[ConfusedPair]) -> list[tuple[ConfusedPair, list[tuple[Shot, Shot]]]]:
        """Return the first pairs of confused classes with examples: queries and their nearest neighbours."""
        return [
            (pair, [(_shot(album, self.images.queries, query), self._neighbour(album, query, 0)) for query in pair.queries[:NUM_EXAMPLES]])
            for pair in pairs[:NUM_PAIRS]
        ]

    def _neighbour(self, album: Album, query: int, rank: int) -> Shot:
        outcomes = self.outcomes
        index, similarity = outcomes.neighbours[query, rank], outcomes.similarities[query, rank]
        return _shot(album, self.images.gallery, index, float(similarity), bool(outcomes.is_right[query, rank]))


def evaluate_finished(run: FinishedRun, queries: EmbeddedImages, gallery: EmbeddedImages, images: Images, method: Method) -> EvaluatedRun:
    """Evaluate a finished run for its page by its own embeddings, `queries` and `gallery`; the map shows some of the selectable queries.

    Raises:
        EvaluationError: the embeddings cannot be scored, or are of other classes than those of all pages.
        StoreError: the scores do not match the embeddings.
    """
    if gallery.dataset.class_names != images.gallery.dataset.class_names:  # variants that hold out different classes
        raise EvaluationError(f"{run.spec.title}: scored on other classes than the first run; look at each run alone, as DATASET/VARIANT")
    config = run.spec.evaluation
    separate_queries = () if queries is gallery else (queries.embeddings, queries.labels)
    outcomes = query_outcomes(gallery.embeddings, gallery.labels, config, NUM_NEIGHBOURS, *separate_queries)
    for name, values in per_query_metrics(outcomes.scores, config.recall_at).items():
        if name in run.metrics and abs(run.metrics[name] - values.mean()) > 1e-9:
            raise StoreError(
                f"{run.scores}: {name} is {run.metrics[name]:.6f}, but {values.mean():.6f} by the embeddings; run {run.spec.title} again"
            )
    drawn = images.selectable[sample_queries(queries.labels[images.selectable], MAX_POINTS, run.spec.seed)]
    can_map = len(drawn) >= 5 and queries.embeddings.shape[1] >= 2
    points = project(queries.embeddings[drawn], config.metric, method, run.spec.seed) if can_map else None
    return EvaluatedRun(run, images, outcomes, method, points, drawn)


def project(embeddings_PD: NDArray[Any], metric: Metric, method: Method, seed: int) -> NDArray[np.float64]:
    """Return (P, 2) positions on a map; t-SNE starts from the first two principal components.

    t-SNE uses one thread: several would sum in a varying order, and wait for each other on a busy machine.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    reduced = principal_components(embeddings_PD, metric, min(NUM_BEFORE_TSNE, *embeddings_PD.shape), seed)
    spread = float(reduced[:, 0].std())
    if method == "pca" or spread < 1e-9:  # all points coincide: nothing to spread out
        return reduced[:, :2]
    start = reduced[:, :2] / spread * 1e-4
    perplexity = min(30.0, (len(reduced) - 1) / 3)
    with threadpool_limits(1):
        positions: NDArray[np.float64] = TSNE(2, perplexity=perplexity, init=start, random_state=seed).fit_transform(reduced)
    return positions


def _intervals(values: dict[str, NDArray[Any]], units_S: NDArray[Any]) -> Intervals:
    """Return metric -> interval of its mean over units of queries, without those that are only a point."""
    ends = np.stack(interval_over_units(np.stack(list(values.values()), axis=1), units_S), axis=1).tolist()
    return {name: (low, high) for name, (low, high) in zip(values, ends, strict=True) if low < high}


def _shot(album: Album, side: EmbeddedImages, index: int, similarity: float | None = None, is_right: bool = True) -> Shot:
    """Return a picture with its caption, adding it to the album."""
    return Shot(album.place(side, index), side.class_name(index), int(index), side.dataset.paths[int(index)], similarity, is_right)
