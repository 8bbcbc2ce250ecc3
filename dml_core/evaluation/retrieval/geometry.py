"""Distances between embeddings, and when two items tie.

Both metrics order items by squared Euclidean distance: "euclidean" of the unchanged embeddings, "cosine" of the embeddings divided by their
norm (then it is 2 - 2 cos). The distance of a pair is computed in float64 from only the two rows and rounded to float32, so it does not
depend on the block, thread count or device. Two items tie when their rounded distances are equal; exact duplicates always do.

Shapes: N points, D dimensions, P pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dml_core.evaluation.config import Metric
from dml_core.evaluation.inputs import EmbeddingShard, checked_embeddings, checked_labels, refuse_rows

BYTES_AT_ONCE = 2**20
NUM_ROWS_AT_ONCE = 4096
NARROW_ROUNDING = 1.02 * 2.0**-8  # maximum rounding error of bfloat16, relative to the rounded number
SMALLEST_NORM = 1e-150  # of an embedding for cosine; below it the squares lose digits in float64 or are 0
# Mean cosine between embeddings, the squared norm of their mean direction, from which their float32 products lose digits, and most digits.
ALIKE, COLLAPSED = 0.9, 0.999
NUM_ROWS_OF_MEAN = 4096  # that are enough to know it
SMALLEST_PRODUCT = 2**12  # pairs in a block from which a matrix product is worth its preparation


@dataclass(frozen=True)
class Points:
    """Embeddings with the divisor of each row: its norm (cosine) or 1 (Euclidean).

    Attributes:
        raw: the embeddings as given.
        divisors: float64.
        metric: cosine or euclidean.
    """

    raw: NDArray[Any]
    divisors: NDArray[np.float64]
    metric: Metric

    def __len__(self) -> int:
        return len(self.raw)

    def rows(self, index: Any) -> NDArray[np.float64]:
        """Return the indexed points in float64."""
        return self.raw[index].astype(np.float64) / self.divisors[index, None]


def as_points(embeddings_ND: NDArray[Any], metric: Metric) -> Points:
    """Return points of `metric` from checked embeddings.

    Raises:
        EvaluationError: cosine of a row of zeros, or of numbers whose squares float64 cannot represent.
    """
    if metric == "euclidean":
        return Points(embeddings_ND, np.ones(len(embeddings_ND)), metric)
    norms_N = np.sqrt(np.einsum("nd,nd->n", embeddings_ND, embeddings_ND, dtype=np.float64))
    refuse_rows(norms_N < SMALLEST_NORM, "zero embeddings, which have no cosine,", "use metric euclidean, or repair the network")
    return Points(embeddings_ND, norms_N, metric)


def load_points(shard: EmbeddingShard, metric: Metric) -> Points:
    """Load the points of a shard.

    Raises:
        EvaluationError: embeddings or labels cannot be scored.
    """
    embeddings_ND = checked_embeddings(shard.load())
    checked_labels(shard.labels, len(embeddings_ND))
    return as_points(embeddings_ND, metric)


def squared_distances(left: Points, left_P: NDArray[np.int64], right: Points, right_P: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the squared distance of each pair (left[left_P[p]], right[right_P[p]]), shape (P,)."""
    distances_P = np.empty(len(left_P), dtype=np.float32)
    num_pairs = max(1, BYTES_AT_ONCE // (8 * left.raw.shape[1]))
    for pairs in blocks(len(left_P), num_pairs):
        distances_P[pairs] = _squared_norms(left.rows(left_P[pairs]) - right.rows(right_P[pairs]))
    return distances_P


def all_squared_distances(
    left: Points, left_I: NDArray[np.int64], right: Points, right_J: NDArray[np.int64], origin_D: NDArray[np.float64] | float = 0.0
) -> NDArray[np.float32]:
    """Return the squared distance of every pair of the indexed points, (I, J), identical to `squared_distances` but faster.

    Products in float64, of the points minus `origin_D`, determine almost every distance to the last bit of its float32; the few others are
    computed pair by pair.
    """
    distances_IJ = np.empty((len(left_I), len(right_J)), dtype=np.float32)
    if distances_IJ.size < SMALLEST_PRODUCT:
        right_JD = right.rows(right_J)
        for rows in blocks(len(left_I), max(1, BYTES_AT_ONCE // max(1, right_JD.nbytes))):
            distances_IJ[rows] = _squared_norms(left.rows(left_I[rows])[:, None] - right_JD)
        return distances_IJ
    for strip in blocks(len(left_I), NUM_ROWS_AT_ONCE // 4):
        left_ID = left.rows(left_I[strip]) - origin_D
        for columns in blocks(len(right_J), NUM_ROWS_AT_ONCE // 4):  # these and their products fit in a processor's cache
            right_JD = right.rows(right_J[columns]) - origin_D
            for rows in blocks(len(left_ID), NUM_ROWS_AT_ONCE // 16):
                low, high = bracketed(left_ID[rows], right_JD)
                unsure_I, unsure_J = np.divmod(np.flatnonzero(low != high), low.shape[1])  # np.nonzero takes as long as the products
                low[unsure_I, unsure_J] = squared_distances(left, left_I[strip][rows][unsure_I], right, right_J[columns][unsure_J])
                distances_IJ[strip, columns][rows] = low
    return distances_IJ


def bracketed(left_ID: NDArray[np.float64], right_JD: NDArray[np.float64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return two bounds on the rounded squared distance of every pair, (I, J); they are tighter for points closer to zero."""
    squares_I, squares_J = (np.einsum("nd,nd->n", rows, rows) for rows in (left_ID, right_JD))
    distances_IJ = (-2 * left_ID) @ right_JD.T
    distances_IJ += squares_I[:, None]
    distances_IJ += squares_J
    largest = float(np.sqrt(squares_J.max()))
    error_I1 = 2 * rounding_error("euclidean", np.sqrt(squares_I), largest, left_ID.shape[1], np.float64)[:, None]
    high_IJ = (distances_IJ + error_I1).astype(np.float32)
    distances_IJ -= error_I1
    return distances_IJ.astype(np.float32), high_IJ


def _squared_norms(differences: NDArray[np.float64]) -> NDArray[np.float32]:
    """Sum over the last axis, which is contiguous: numpy then adds each row in the same order, independent of the row's position."""
    return np.square(differences, out=differences).sum(axis=-1).astype(np.float32)


def as_similarities(squared_distances: NDArray[np.float32], metric: Metric) -> NDArray[np.float32]:
    """Return cosines, or negative distances: larger is nearer."""
    values = 1 - squared_distances / 2 if metric == "cosine" else -np.sqrt(squared_distances)
    return values.astype(np.float32)


def origin(points: Points) -> NDArray[np.float64]:
    """Return a point (D,) to subtract: float32 rounding would otherwise dominate distances between points far from zero.

    It is the mean, but zero for directions that are not all alike.
    """
    mean_D = mean(points)
    return mean_D if points.metric == "euclidean" or mean_D @ mean_D > COLLAPSED else np.zeros_like(mean_D)


def around_mean(points: Points) -> tuple[Points, NDArray[np.float64]]:
    """Return points with the same distances, and the point to subtract from them (D,) so that products have small errors.

    Directions that are much alike, as those of an untrained network, have cosines near 1, which hardly differ in float32. As Euclidean
    points around their mean they have small norms, and so small errors.
    """
    if points.metric == "euclidean":
        return points, mean(points)
    mean_D = mean(points, NUM_ROWS_OF_MEAN)
    if mean_D @ mean_D > ALIKE:
        return replace(points, metric="euclidean"), mean_D
    return points, np.zeros_like(mean_D)


def mean(points: Points, num_rows: int | None = None) -> NDArray[np.float64]:
    """Return the mean (D,) of all points, or of `num_rows` evenly spaced ones; exact in coordinates that are the same in all of them.

    So points that are all the same, as those of a collapsed network, are exactly 0 around it, and their distances need no second look.
    """
    index = np.unique(np.linspace(0, len(points) - 1, min(len(points), num_rows or len(points)), dtype=np.int64))
    sums_D = np.zeros(points.raw.shape[1])
    lowest_D, highest_D = np.full_like(sums_D, np.inf), np.full_like(sums_D, -np.inf)
    for some in blocks(len(index), NUM_ROWS_AT_ONCE):
        rows_ID = points.rows(index[some])
        sums_D += rows_ID.sum(axis=0)
        lowest_D, highest_D = np.minimum(lowest_D, rows_ID.min(axis=0)), np.maximum(highest_D, rows_ID.max(axis=0))
    return np.where(lowest_D == highest_D, lowest_D, sums_D / len(index))


def centred(
    points: Points, origin_D: NDArray[np.float64], index: NDArray[np.int64] | None = None, dtype: type[np.floating[Any]] = np.float32
) -> NDArray[Any]:
    """Return the (indexed) points minus `origin_D`, which changes no distance, in float32 or `dtype`; (N, D)."""
    num_rows = len(points) if index is None else len(index)
    centred_ND = np.empty((num_rows, points.raw.shape[1]), dtype=dtype)
    for rows in blocks(num_rows, NUM_ROWS_AT_ONCE):
        centred_ND[rows] = points.rows(rows if index is None else index[rows]) - origin_D
    return centred_ND


def blocks(num_rows: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` rows that cover `num_rows` rows."""
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def narrow_error(losses: NDArray[np.float64], largest_loss: float, num_dimensions: int) -> NDArray[np.float64]:
    """Return a bound on the error of a cosine from a product of bfloat16 vectors a', b' summed in float32, before rounding the sum.

    ab - a'b' = (a - a')b + a'(b - b'), at most |a - a'| |b| + |a'| |b - b'| (Cauchy and Schwarz), and |a'| <= 1 + |a - a'|: for unit
    vectors |a - a'| + (1 + |a - a'|) |b - b'|. Products of two bfloat16 numbers are float32 numbers, so only the sums are rounded: by D
    2^-23 of the product of norms, truncated or rounded. (The result, rounded to 8 bits, then has a further relative error of at most
    NARROW_ROUNDING.) The 16 covers the earlier rounding of the vectors to float32 and that of the bounds.

    Args:
        losses: |a - a'| of the queries, below 1/200.
        largest_loss: the largest |b - b'|, below 1/200.
        num_dimensions: D, at most 2^14.
    """
    of_sums = (num_dimensions + 16) * 2.0**-23
    return losses + (1 + losses) * largest_loss + 1.02 * of_sums / (1 - of_sums)


def rounding_error(
    metric: Metric, norms: NDArray[Any], largest_norm: float, num_dimensions: int, dtype: Any = np.float32
) -> NDArray[np.float64]:
    """Return a bound on the error of a pair's nearness in float32 or float64, for any order of the sums. The squared distance has twice it.

    Nearness is ab (cosine) or ab - |a|^2 / 2 - |b|^2 / 2 = -d^2 / 2 (Euclidean). A sum of D products errs by at most D u / (1 - D u) times
    the sum of their magnitudes, u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), which is at most |a| |b|,
    or (|a| + |b|)^2 / 2. The 16 covers the rounding of coordinates, of the other terms and of the bounds. In float64 u is 2^-53; the
    directly summed distance, to which the bound refers, errs by up to twice as much again: hence 2^-51. The last term is for products that
    are too small for a normal float32; between zeros there is none.

    Args:
        metric: cosine (of vectors of norm 1) or euclidean.
        norms: |a| of the queries.
        largest_norm: the largest |b|.
        num_dimensions: D.
        dtype: type of the products.
    """
    relative = (num_dimensions + 16) * (2.0**-51 if dtype == np.float64 else 2.0**-24)
    queries = norms.astype(np.float64)
    magnitudes: NDArray[np.float64] = np.ones_like(queries) if metric == "cosine" else np.square(queries + largest_norm) / 2
    return relative / (1 - relative) * magnitudes + num_dimensions * 2.0**-126 * (queries + largest_norm > 0)
