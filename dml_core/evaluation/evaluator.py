"""All metrics of a set of embeddings, as one flat mapping of fractions and counts.

The rules (self, ties, queries without a positive, averages) are stated in `retrieval`, `clustering` and docs/reference/metrics.md.

Shapes: N gallery items, Q queries, D dimensions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dml_core.errors import EvaluationError
from dml_core.evaluation.clustering import clustering_metrics, kmeans
from dml_core.evaluation.config import EvaluationConfig, as_config
from dml_core.evaluation.inputs import EmbeddingShard, checked_embeddings, checked_labels, label_codes
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.retrieval.metrics import QueryScores, per_query_metrics
from dml_core.evaluation.retrieval.sweep import retrieve
from dml_core.evaluation.retrieval.tiles import usable_device
from dml_core.evaluation.separability import class_distances, class_separability
from dml_core.evaluation.statistics.confidence import interval_over_units

__all__ = ["EmbeddingShard", "EvaluationConfig", "evaluate", "evaluate_shards", "recall_by_class"]


class ClassRecall(NamedTuple):
    """Recall@1 of one class, and its number of queries with a positive."""

    recall: float
    num_queries: int


def evaluate(
    embeddings: ArrayLike,
    labels: ArrayLike,
    config: EvaluationConfig | Mapping[str, Any] | None = None,
    query_embeddings: ArrayLike | None = None,
    query_labels: ArrayLike | None = None,
    seed: int = 0,
    by_class: dict[Any, ClassRecall] | None = None,
) -> dict[str, float | int]:
    """Return all metrics that `config` requests, by default those of docs/reference/metrics.md with Recall@1, 2, 4 and 8.

    Clustering, separability and class distances use all samples: gallery and queries together.

    Args:
        embeddings: (N, D) floats, an array or a torch tensor on any device: the gallery, and also the queries if none are given (each
            excluded from its own gallery by index).
        labels: (N,) integers or strings.
        config: settings of the evaluation, also as a mapping; None for the defaults.
        query_embeddings: (Q, D), given together with `query_labels` for the query/gallery protocol.
        query_labels: (Q,).
        seed: seed of k-means.
        by_class: filled with Recall@1 of each class that has a query with a positive, by label.

    Raises:
        EvaluationError: embeddings, labels or the seed cannot be used, no query has a positive, or a device is missing.
        ConfigError: wrong settings.
    """
    config = as_config(config)
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise EvaluationError(f"seed {seed!r}: expected a whole number from 0")
    gallery_ND = checked_embeddings(embeddings)
    labels_N = checked_labels(labels)
    gallery = [EmbeddingShard(lambda: gallery_ND, labels_N)]
    if (query_embeddings is None) != (query_labels is None):
        raise EvaluationError("query embeddings and query labels go together; give both or neither")
    if query_embeddings is None or query_labels is None:
        values = evaluate_shards(gallery, config, None, by_class)
        samples_SD, codes_S = gallery_ND, label_codes([labels_N])[1][0]
    else:
        queries_QD = checked_embeddings(query_embeddings, "query embeddings")
        query_labels_Q = checked_labels(query_labels, len(queries_QD), "query labels")
        values = evaluate_shards(gallery, config, [EmbeddingShard(lambda: queries_QD, query_labels_Q)], by_class)
        samples_SD, codes_S = np.concatenate([gallery_ND, queries_QD]), np.concatenate(label_codes([labels_N, query_labels_Q])[1])
    return values | _class_structure(samples_SD, codes_S, config, seed)


def evaluate_shards(
    gallery: Sequence[EmbeddingShard],
    config: EvaluationConfig | Mapping[str, Any] | None,
    queries: Sequence[EmbeddingShard] | None = None,
    by_class: dict[Any, ClassRecall] | None = None,
) -> dict[str, float | int]:
    """Return the exact retrieval metrics of a gallery that may exceed memory; without `queries` its items are the queries.

    Memory holds one query shard and one gallery shard, each with a float32 copy, besides what `config.max_block_bytes` allows. The gallery
    is read twice for each query shard.

    Raises:
        EvaluationError, ConfigError: as in `evaluate`.
    """
    config = as_config(config)
    scores, codes_Q, names = retrieve(gallery, config, queries)
    if not scores.is_scored.any():
        raise EvaluationError("no query has another sample of its class in the gallery, so nothing can be found; check the labels")
    metrics = per_query_metrics(scores, config.recall_at)
    values: dict[str, float | int] = {name: float(values_S.mean()) for name, values_S in metrics.items()}
    recalls = _named_recalls(scores, codes_Q, names)
    values |= {"recall@1_class_mean": float(np.mean([of_class.recall for of_class in recalls.values()])), "num_query_classes": len(recalls)}
    if by_class is not None:
        by_class.update(recalls)
    if config.intervals is not None:
        values |= _intervals(metrics, codes_Q[scores.is_scored], config.intervals.confidence)
    return values | {"num_queries": len(codes_Q), "num_queries_without_positive": int((~scores.is_scored).sum())}


def recall_by_class(
    gallery: EmbeddingShard, config: EvaluationConfig | Mapping[str, Any] | None, queries: EmbeddingShard | None = None
) -> dict[Any, ClassRecall]:
    """Return Recall@1 of each class that has a query with a positive, by label.

    Raises:
        EvaluationError, ConfigError: as in `evaluate`.
    """
    scores, codes_Q, names = retrieve([gallery], as_config(config), None if queries is None else [queries])
    return _named_recalls(scores, codes_Q, names)


def _named_recalls(scores: QueryScores, codes_Q: NDArray[np.int64], names: NDArray[Any]) -> dict[Any, ClassRecall]:
    codes, class_S, sizes = np.unique(codes_Q[scores.is_scored], return_inverse=True, return_counts=True)
    hits = np.bincount(class_S, weights=scores.first_rank[scores.is_scored] == 1)
    return dict(zip(names[codes].tolist(), map(ClassRecall, (hits / sizes).tolist(), sizes.tolist()), strict=True))


def _intervals(metrics: dict[str, NDArray[np.float64]], codes_S: NDArray[np.int64], confidence: float) -> dict[str, float]:
    """Return the ends of each metric's interval over queries (`_low`, `_high`) and over classes (`_class_low`, `_class_high`).

    A metric that does not vary over queries or classes has none.
    """
    values_SM = np.stack(list(metrics.values()), axis=1)
    ends: dict[str, float] = {}
    for over, units_S in (("", np.arange(len(codes_S))), ("class_", codes_S)):
        for end, values_M in zip(("low", "high"), interval_over_units(values_SM, units_S, confidence), strict=True):
            ends |= {f"{name}_{over}{end}": float(value) for name, value in zip(metrics, values_M, strict=True) if not np.isnan(value)}
    return ends


def _class_structure(embeddings_ND: NDArray[Any], codes_N: NDArray[np.int64], config: EvaluationConfig, seed: int) -> dict[str, float]:
    """Return the separability of the unchanged embeddings, and class distances and clustering metrics under the configured metric."""
    points = as_points(embeddings_ND, config.metric)
    values = class_separability(as_points(embeddings_ND, "euclidean"), codes_N) | class_distances(points, codes_N)
    if config.clustering:
        clusters_N, _ = kmeans(points, int(codes_N.max()) + 1, config.kmeans, seed, usable_device(config.device))
        values |= clustering_metrics(codes_N, clusters_N)
    return values
