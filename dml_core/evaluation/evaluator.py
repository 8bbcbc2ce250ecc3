"""Every metric of a set of embeddings, as one flat mapping of fractions and counts.

The rules (self, ties, queries without a positive, averages) are stated in `retrieval`, `clustering` and `docs/evaluation.md`.
"""

import numpy as np
from numpy.typing import ArrayLike

from dml_core.errors import EvaluationError
from dml_core.evaluation.clustering import clustering_metrics, kmeans
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.geometry import as_points
from dml_core.evaluation.inputs import checked_embeddings, checked_labels, label_codes
from dml_core.evaluation.retrieval import per_query_metrics
from dml_core.evaluation.separability import class_separability
from dml_core.evaluation.sweep import Resources, Shard, score_queries
from dml_core.evaluation.tiles import usable_device

__all__ = ["EvaluationConfig", "evaluate"]


def evaluate(
    embeddings: ArrayLike,
    labels: ArrayLike,
    config: EvaluationConfig,
    query_embeddings: ArrayLike | None = None,
    query_labels: ArrayLike | None = None,
    seed: int = 0,
) -> dict[str, float | int]:
    """All metrics that `config` asks for.

    Args:
        embeddings: (N, D) floats: the gallery, and the queries too where none are given (each left out of its own gallery by index).
        labels: (N,) integers or strings.
        config: what is measured.
        query_embeddings: (Q, D), given together with `query_labels` for the query/gallery protocol.
        query_labels: (Q,).
        seed: of k-means and bootstrap.

    Raises:
        EvaluationError: embeddings or labels that cannot be scored, no query with a positive, or a device that is absent.
    """
    if (query_embeddings is None) != (query_labels is None):
        raise EvaluationError("query embeddings and query labels go together; give both or neither")
    gallery_ND = checked_embeddings(embeddings)
    labels_N = checked_labels(labels, len(gallery_ND))
    exclude_self = query_embeddings is None
    queries_QD = gallery_ND if query_embeddings is None else checked_embeddings(query_embeddings, "query embeddings")
    query_labels_Q = None if query_labels is None else checked_labels(query_labels, len(queries_QD), "query labels")
    if queries_QD.shape[1] != gallery_ND.shape[1]:
        raise EvaluationError(f"embeddings have {gallery_ND.shape[1]} dimensions but query embeddings {queries_QD.shape[1]}")
    codes_N, query_codes_Q = label_codes(labels_N, query_labels_Q)
    gallery, queries = as_points(gallery_ND, config.metric), as_points(queries_QD, config.metric)
    resources = Resources(config.max_block_bytes, usable_device(config.device))
    self_index = np.arange(len(gallery)) if exclude_self else None
    scores = score_queries([Shard(lambda: gallery, codes_N, 0)], queries, query_codes_Q, self_index, resources)
    if not scores.is_scored.any():
        raise EvaluationError("no query has a positive: every class has a single sample in the gallery, so nothing can be found")
    values: dict[str, float | int] = {name: float(np.mean(v)) for name, v in per_query_metrics(scores, config.recall_at).items()}
    values |= {"num_queries": len(queries), "num_queries_without_positive": int((~scores.is_scored).sum())}
    classes_N = np.unique(codes_N, return_inverse=True)[1]
    values |= class_separability(as_points(gallery_ND, "euclidean"), classes_N)
    if config.clustering:
        values |= clustering_metrics(classes_N, kmeans(gallery, int(classes_N.max()) + 1, config.kmeans, seed)[0])
    return values
