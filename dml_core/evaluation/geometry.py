"""What "nearer" means, and when two items are equally near.

Both metrics order items by squared Euclidean distance: "euclidean" of the embeddings as they are, "cosine" of the embeddings divided
by their norm (then it is 2 - 2 cos). The distance of a pair is computed in float64 from the two rows alone and rounded to float32: it is
a function of the pair, whatever the block, thread count or device that found the pair. Two items tie when their rounded distances are
the same number; exact duplicates always do.

Shapes: N points, D dimensions, P pairs.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dml_core.evaluation.inputs import refuse_rows

Metric = Literal["cosine", "euclidean"]
BYTES_PER_PAIR_BLOCK = 8 * 2**20
NUM_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Points:
    """Embeddings with the divisor of each row: its norm (cosine) or 1 (Euclidean).

    Attributes:
        raw: the embeddings as given.
        divisors: float64.
        metric: which of the two.
    """

    raw: NDArray[Any]
    divisors: NDArray[np.float64]
    metric: Metric

    def __len__(self) -> int:
        return len(self.raw)

    def rows(self, index: Any) -> NDArray[np.float64]:
        """The indexed points in float64."""
        rows_PD: NDArray[np.float64] = self.raw[index].astype(np.float64) / self.divisors[index, None]
        return rows_PD


def as_points(embeddings_ND: NDArray[Any], metric: Metric) -> Points:
    """Points of `metric` from checked embeddings.

    Raises:
        EvaluationError: cosine of a row of zeros.
    """
    if metric == "euclidean":
        return Points(embeddings_ND, np.ones(len(embeddings_ND)), metric)
    norms_N = np.sqrt(np.einsum("nd,nd->n", embeddings_ND, embeddings_ND, dtype=np.float64))
    refuse_rows(norms_N == 0, "zero embeddings, which have no cosine,", "use metric euclidean or mend the network")
    return Points(embeddings_ND, norms_N, metric)


def squared_distances(left: Points, left_P: NDArray[np.int64], right: Points, right_P: NDArray[np.int64]) -> NDArray[np.float32]:
    """Squared distance of each pair (left[left_P[p]], right[right_P[p]]), shape (P,)."""
    distances_P = np.empty(len(left_P), dtype=np.float32)
    num_pairs = max(1, BYTES_PER_PAIR_BLOCK // (8 * left.raw.shape[1]))
    for start in range(0, len(left_P), num_pairs):
        block = slice(start, start + num_pairs)
        differences_PD = left.rows(left_P[block]) - right.rows(right_P[block])
        distances_P[block] = np.square(differences_PD, out=differences_PD).sum(axis=1)
    return distances_P


def as_similarities(squared_distances: NDArray[np.float32], metric: Metric) -> NDArray[np.float32]:
    """Cosines, or negative distances: larger is nearer."""
    values = 1 - squared_distances / 2 if metric == "cosine" else -np.sqrt(squared_distances)
    return values.astype(np.float32)


def centred(points: Points) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Points moved to where float32 serves them best, (N, D), and the origin that was taken from them, (D,).

    Distances between embeddings far from zero would drown in the rounding of float32; moving all by one vector changes no distance.
    """
    origin_D = np.zeros(points.raw.shape[1])
    if points.metric == "euclidean":
        origin_D = points.raw.mean(axis=0, dtype=np.float64)
    centred_ND = np.empty(points.raw.shape, dtype=np.float32)
    for start in range(0, len(points), NUM_ROWS_AT_ONCE):
        rows = slice(start, start + NUM_ROWS_AT_ONCE)
        centred_ND[rows] = points.rows(rows) - origin_D
    return centred_ND, origin_D


def rounding_error(norm_sums: NDArray[Any], num_dimensions: int) -> NDArray[np.float64]:
    """Bound on the error of |a|^2 + |b|^2 - 2 ab in float32 against the exact distance, whatever the order of the sums.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: a sum of D products is off by at most D u / (1 - D u) times the
    sum of their magnitudes, u = 2^-24; the magnitudes add up to at most (|a| + |b|)^2. The 8 covers the rounding of the inputs, of the
    three terms' sum, and of the exact distance itself.

    Args:
        norm_sums: |a| + |b|.
        num_dimensions: D.
    """
    relative = (num_dimensions + 8) * 2.0**-24
    bound: NDArray[np.float64] = relative / (1 - relative) * np.square(norm_sums, dtype=np.float64)
    return bound
