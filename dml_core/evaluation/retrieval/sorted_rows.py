"""Exact scoring of queries with a large share of positives: whole rows of exact distances, sorted up to R.

If a query has thousands of positives, nearly every item is between them, so every pair must be placed; sorting places all at once.

Shapes: N gallery items, Q queries, I queries of a block, R positives.
"""

import numpy as np
from numpy.typing import NDArray

from dml_core.evaluation.retrieval.geometry import Points, all_squared_distances, blocks, mean
from dml_core.evaluation.retrieval.metrics import QueryScores
from dml_core.evaluation.retrieval.tiles import common_classes

BYTES_PER_ENTRY = 16
LAST = np.uint32(2**32 - 2)  # farther than everything, and even: not a positive


def score_rows(
    gallery: Points,
    codes_N: NDArray[np.int64],
    queries: Points,
    codes_Q: NDArray[np.int64],
    self_index_Q: NDArray[np.int64] | None,
    max_bytes: int,
) -> QueryScores:
    """Return the scores of every query, in order; arguments as in `sweep.score_queries`, with `max_bytes` the limit per block."""
    order_N, order_Q = np.argsort(codes_N, kind="stable"), np.argsort(codes_Q, kind="stable")
    sorted_N, place_N = codes_N[order_N], np.argsort(order_N)
    origin_D = mean(gallery)
    num_positives, first_rank = np.zeros((2, len(queries)), dtype=np.int64)
    average_precision, r_precision = np.zeros((2, len(queries)))
    for block in blocks(len(queries), max(1, max_bytes // (BYTES_PER_ENTRY * len(gallery)))):
        index_I = order_Q[block]
        keys_IN = all_squared_distances(queries, index_I, gallery, order_N, origin_D).view(np.uint32)
        keys_IN <<= 1  # the bits of non-negative floats are in the order of the floats
        for _, rows, columns in common_classes(codes_Q[index_I], sorted_N):
            keys_IN[rows, columns] |= 1  # after a negative at the same distance
        if self_index_Q is not None:
            keys_IN[np.arange(len(index_I)), place_N[self_index_Q[index_I]]] = LAST
        for _, rows, columns in common_classes(codes_Q[index_I], sorted_N):
            num_in_class = columns.stop - columns.start - (self_index_Q is not None)
            if num_in_class > 0:
                which = index_I[rows]
                num_positives[which] = num_in_class
                first_rank[which], average_precision[which], r_precision[which] = _scores(keys_IN[rows], num_in_class)
    return QueryScores(num_positives, first_rank, average_precision, r_precision)


def _scores(keys_IN: NDArray[np.uint32], num_positives: int) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return first rank, average precision at R and R-precision of queries with R positives, whose keys are odd."""
    keys_IN.partition(num_positives - 1, axis=1)
    nearest_IR = np.sort(keys_IN[:, :num_positives], axis=1)
    hits_IR = (nearest_IR & 1).astype(np.int32)
    first_rank = hits_IR.argmax(axis=1) + 1
    for row in np.flatnonzero(~hits_IR.any(axis=1)):
        keys_N = keys_IN[row]
        first_rank[row] = np.count_nonzero(keys_N < keys_N[keys_N & 1 == 1].min()) + 1
    precisions_IR = np.cumsum(hits_IR, axis=1) / np.arange(1, num_positives + 1)
    return first_rank, np.einsum("ir,ir->i", precisions_IR, hits_IR) / num_positives, hits_IR.sum(axis=1) / num_positives
