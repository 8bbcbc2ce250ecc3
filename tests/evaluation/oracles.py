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
    gallery, queries = _in_float64(gallery, metric), _in_float64(queries, metric)
    scores = []
    for q, (query, label) in enumerate(zip(queries, query_labels, strict=True)):
        distances = np.sum((query - gallery) ** 2, axis=1).astype(np.float32).tolist()
        neighbours = []
        for g, distance in enumerate(distances):
            if not (exclude_self and g == q):
                neighbours.append((distance, bool(labels[g] == label)))
        hits = [is_positive for _, is_positive in sorted(neighbours)]  # False before True: a tie never helps
        num_positives = sum(hits)
        if num_positives == 0:
            scores.append((0, 0, 0.0, 0.0))
            continue
        precisions = [sum(hits[:rank]) / rank for rank in range(1, num_positives + 1) if hits[rank - 1]]
        scores.append((num_positives, hits.index(True) + 1, sum(precisions) / num_positives, sum(hits[:num_positives]) / num_positives))
    return scores


def _in_float64(points: NDArray[np.float32], metric: str) -> NDArray[np.float64]:
    rows = [row.astype(np.float64) for row in points]
    return np.array([row / np.sqrt(np.dot(row, row)) for row in rows] if metric == "cosine" else rows)
