"""Slow loops written from the definitions, as references for the evaluator."""

import numpy as np
from numpy.typing import NDArray


def slow_scores(
    gallery: NDArray[np.float32],
    labels: NDArray[np.generic],
    queries: NDArray[np.float32] | None = None,
    query_labels: NDArray[np.generic] | None = None,
    metric: str = "cosine",
) -> list[tuple[int, int, float, float]]:
    """Return (R, first rank, average precision at R, R-precision) of each query, from a fully sorted list of its neighbours."""
    exclude_self = queries is None
    queries, query_labels = (gallery, labels) if queries is None else (queries, query_labels)
    scores = []
    for q, (query, label) in enumerate(zip(queries, query_labels, strict=True)):
        neighbours = []
        for g, item in enumerate(gallery):
            if not (exclude_self and g == q):
                neighbours.append((_distance(query, item, metric), bool(labels[g] == label)))
        hits = [is_positive for _, is_positive in sorted(neighbours)]  # False before True: a tie never helps
        num_positives = sum(hits)
        if num_positives == 0:
            scores.append((0, 0, 0.0, 0.0))
            continue
        precisions = [sum(hits[:rank]) / rank for rank in range(1, num_positives + 1) if hits[rank - 1]]
        scores.append((num_positives, hits.index(True) + 1, sum(precisions) / num_positives, sum(hits[:num_positives]) / num_positives))
    return scores


def _distance(left: NDArray[np.float32], right: NDArray[np.float32], metric: str) -> np.float32:
    left, right = left.astype(np.float64), right.astype(np.float64)
    if metric == "cosine":
        left, right = left / np.sqrt(np.dot(left, left)), right / np.sqrt(np.dot(right, right))
    return np.float32(np.sum((left - right) ** 2))
