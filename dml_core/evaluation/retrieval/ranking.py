"""Rank counting: positions of each query's positives among its negatives, without a sorted list of neighbours.

Recall@K, MAP@R, R-precision and MRR need only the ranks of a query's positives, and all but the first of these only up to R. A negative
before the first positive is only counted; one between the first positive and the last useful one is located by binary search; all others
need no work. A positive whose rank exceeds R is useless, so fewer and fewer negatives need work as the gallery is swept.

Shapes: Q queries (each with a positive), P positives of all queries, query by query and nearest first, E negatives.
"""

from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray


class RankCounter:
    """Counts the negatives before each positive, for a set of queries.

    Args:
        distances_P: squared distances of the positives, ascending within each query.
        sizes_Q: number of positives of each query, at least 1.
    """

    def __init__(self, distances_P: NDArray[np.float32], sizes_Q: NDArray[np.int64]) -> None:
        self.distances = distances_P
        self.sizes = sizes_Q
        self.starts = np.concatenate([[0], np.cumsum(sizes_Q)])
        self.keys = _keys(np.arange(len(sizes_Q)).repeat(sizes_Q), distances_P)
        self.counts = np.zeros(len(distances_P), dtype=np.int64)
        self.num_useful = sizes_Q.copy()
        self._adding = Lock()

    def bounds(self, rows: slice) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the distances of the first and last useful positive of each query in `rows`."""
        starts = self.starts[:-1][rows]
        return self.distances[starts], self.distances[starts + self.num_useful[rows] - 1]

    def insertion_points(self, rows: slice, queries_E: NDArray[np.int64], distances_E: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the index into P of the query's first positive that is not nearer than the given distance (one past its last: none)."""
        first, last = self.starts[rows.start], self.starts[rows.stop]
        keys, wanted = torch.from_numpy(self.keys[first:last]), torch.from_numpy(_keys(queries_E, distances_E))
        points_E: NDArray[np.int64] = torch.searchsorted(keys, wanted).numpy()
        points_E += first
        return points_E

    def are_nearer(self, points_E: NDArray[np.int64], queries_E: NDArray[np.int64], distances_E: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return whether the query has a positive at its insertion point that is nearer than the given distance."""
        nearer_E: NDArray[np.bool_] = self.distances[np.minimum(points_E, len(self.distances) - 1)] < distances_E
        return nearer_E & (points_E < self.starts[queries_E + 1])

    def add(self, rows: slice, num_before_first: NDArray[np.int64], queries_E: NDArray[np.int64], points_E: NDArray[np.int64]) -> None:
        """Add negatives of the queries in `rows`: those before the first positive as counts, the others by insertion point.

        Several threads may add at once, in any order.
        """
        first, last = self.starts[rows.start], self.starts[rows.stop]
        inside_E = points_E < self.starts[queries_E + 1]
        with self._adding:
            self.counts[first:last] += np.bincount(points_E[inside_E] - first, minlength=last - first)
            self.counts[self.starts[:-1][rows]] += num_before_first
            ranks = self._ranks(rows)
            is_useful = ranks <= self.sizes[rows].repeat(self.sizes[rows])
            num_useful = np.add.reduceat(is_useful, self.starts[:-1][rows] - first)
            self.num_useful[rows] = np.minimum(self.num_useful[rows], np.maximum(num_useful, 1))

    def forget_counts(self) -> None:
        """Reset the counts, keeping which positives are useless: a positive useless for a part of the gallery is so for the whole."""
        self.counts[:] = 0

    def scores(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Return first rank, average precision at R and R-precision of each query, after all negatives were added."""
        everything = slice(0, len(self.sizes))
        order_P, ranks_P = self._order(everything), self._ranks(everything)
        is_within_P = (ranks_P <= self.sizes.repeat(self.sizes)) & (order_P <= self.num_useful.repeat(self.sizes))
        starts = self.starts[:-1]
        precision_Q = np.add.reduceat(np.where(is_within_P, order_P / ranks_P, 0.0), starts) / self.sizes
        return ranks_P[starts], precision_Q, np.add.reduceat(is_within_P, starts) / self.sizes

    def _order(self, rows: slice) -> NDArray[np.int64]:
        """Return 1, 2, ... for the positives of each query in `rows`."""
        first, last = self.starts[rows.start], self.starts[rows.stop]
        return np.arange(first, last) - self.starts[:-1][rows].repeat(self.sizes[rows]) + 1

    def _ranks(self, rows: slice) -> NDArray[np.int64]:
        """Return ranks by the negatives added so far."""
        first, last = self.starts[rows.start], self.starts[rows.stop]
        sums = np.concatenate([[0], np.cumsum(self.counts[first:last])])
        before_query = sums[self.starts[:-1][rows] - first]
        return sums[1:] - before_query.repeat(self.sizes[rows]) + self._order(rows)


def _keys(queries_E: NDArray[np.int64], distances_E: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return integers ordered by (query, distance): the bits of non-negative floats are in the order of the floats."""
    return (queries_E << 32) | np.maximum(distances_E, 0).view(np.uint32)
