"""Ranks of every query's positives, exactly, without sorting the gallery."""

import numpy as np
from numpy.typing import NDArray

from dml_core.evaluation.geometry import Points, squared_distances
from dml_core.evaluation.retrieval import QueryScores


def score_queries(
    gallery: Points, gallery_codes_N: NDArray[np.int64], queries: Points, query_codes_Q: NDArray[np.int64], exclude_self: bool
) -> QueryScores:
    """Scores of every query against the gallery, one query at a time."""
    columns = np.zeros((4, len(queries)))
    everything_N = np.arange(len(gallery))
    for query, code in enumerate(query_codes_Q):
        distances_N = squared_distances(gallery, everything_N, queries, np.full(len(gallery), query))
        others_N = everything_N != query if exclude_self else np.ones(len(gallery), dtype=bool)
        positives_R = np.sort(distances_N[others_N & (gallery_codes_N == code)])
        negatives_M = np.sort(distances_N[gallery_codes_N != code])
        if num_positives := len(positives_R):
            order_R = np.arange(1, num_positives + 1)
            ranks_R = order_R + np.searchsorted(negatives_M, positives_R, side="right")
            within_R = ranks_R <= num_positives
            precision = (order_R / ranks_R)[within_R].sum() / num_positives
            columns[:, query] = num_positives, ranks_R[0], precision, within_R.mean()
    return QueryScores(columns[0].astype(np.int64), columns[1].astype(np.int64), columns[2], columns[3])
