"""Exact scoring of queries with a large share of positives: whole rows of exact distances, sorted up to R.

If a query has thousands of positives, nearly every item is between them, so every pair must be placed; sorting places all at once. The
distances are those of `geometry`: products in float64 determine almost all of them to the last bit of their float32; the few others are
computed pair by pair.

Shapes: N gallery items, Q queries, I queries of a block, J items of a block, D dimensions.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dml_core.evaluation.retrieval.geometry import Points, blocks, mean, rounding_error, squared_distances
from dml_core.evaluation.retrieval.metrics import QueryScores
from dml_core.evaluation.retrieval.tiles import common_classes

BYTES_PER_ENTRY = 16
NUM_ROWS_AT_ONCE, NUM_COLUMNS_AT_ONCE = 256, 1024
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
    items_NF, norms_N = _factors(gallery, order_N, origin_D, is_query=False)
    num_positives, first_rank = np.zeros((2, len(queries)), dtype=np.int64)
    average_precision, r_precision = np.zeros((2, len(queries)))
    for block in blocks(len(queries), max(1, max_bytes // (BYTES_PER_ENTRY * len(gallery)))):
        index_I = order_Q[block]
        keys_IN = _distances(queries, index_I, gallery, order_N, origin_D, items_NF, float(norms_N.max())).view(np.uint32)
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


def _factors(points: Points, index: NDArray[np.int64], origin_D: NDArray[np.float64], is_query: bool) -> tuple[Tensor, NDArray[np.float64]]:
    """Return rows whose products are squared distances, (N, D + 2): (-2x, |x|^2, 1) of a query, (y, 1, |y|^2) of an item; and the norms."""
    num_dimensions = points.raw.shape[1]
    factors_NF, squares_N = np.ones((len(index), num_dimensions + 2)), np.empty(len(index))
    for rows in blocks(len(index), NUM_COLUMNS_AT_ONCE):
        centred_ID = points.rows(index[rows]) - origin_D
        squares_N[rows] = np.einsum("id,id->i", centred_ID, centred_ID)
        factors_NF[rows, :num_dimensions] = -2 * centred_ID if is_query else centred_ID
    factors_NF[:, num_dimensions + (not is_query)] = squares_N
    return torch.from_numpy(factors_NF), np.sqrt(squares_N)


def _distances(
    queries: Points,
    index_I: NDArray[np.int64],
    gallery: Points,
    order_N: NDArray[np.int64],
    origin_D: NDArray[np.float64],
    items_NF: Tensor,
    largest_norm: float,
) -> NDArray[np.float32]:
    """Return the squared distance of every pair, (I, N), items in the given order, identical to `geometry.squared_distances`.

    Around their mean, which changes no distance, points close together have small norms and so small errors. The bound is that of
    `geometry.rounding_error` for float64: with u = 2^-53 the product of D + 2 terms errs by at most (D + 2) u (|a| + |b|)^2, the squares in
    it by D u of the same, the coordinates by 4 u, and the direct sum by (D + 3) u; together less than 4 u (D + 16).
    """
    factors_IF, norms_I = _factors(queries, index_I, origin_D, is_query=True)
    error_I1 = torch.from_numpy(2 * rounding_error("euclidean", norms_I, largest_norm, queries.raw.shape[1], np.float64)[:, None])
    distances_IN = np.empty((len(index_I), len(order_N)), dtype=np.float32)
    low_IN = torch.from_numpy(distances_IN)
    for rows in blocks(len(index_I), NUM_ROWS_AT_ONCE):
        for columns in blocks(len(order_N), NUM_COLUMNS_AT_ONCE):
            found_IJ = torch.mm(factors_IF[rows], items_NF[columns].T)
            high_IJ = (found_IJ + error_I1[rows]).to(torch.float32)
            low_IN[rows, columns] = found_IJ.sub_(error_I1[rows])
            unsure_I, unsure_J = (index.numpy() for index in (low_IN[rows, columns] != high_IJ).nonzero(as_tuple=True))
            exact = squared_distances(queries, index_I[rows][unsure_I], gallery, order_N[columns][unsure_J])
            distances_IN[rows, columns][unsure_I, unsure_J] = exact
    return distances_IN
