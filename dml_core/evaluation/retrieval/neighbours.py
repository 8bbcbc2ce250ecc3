"""Exact nearest neighbours: FAISS finds the candidates, the distances of `geometry` order them.

Ties are ordered by index. FAISS's float32 search is trusted only within its rounding error: if the last candidate is not farther than the
k-th neighbour by more than that error, the query is compared with the whole gallery, block by block in float64. So memory stays bounded
even if a collapsed network maps all items to one point.

Shapes: N gallery items, Q queries, D dimensions, k neighbours, m candidates, I queries and J items of a block, E pairs.
"""

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from dml_core.errors import EvaluationError
from dml_core.evaluation.config import Device
from dml_core.evaluation.retrieval.geometry import (
    Points,
    around_mean,
    as_similarities,
    blocks,
    bracketed,
    centred,
    mean,
    rounding_error,
    squared_distances,
)
from dml_core.evaluation.threads import is_large, one_thread

NUM_SPARE_CANDIDATES = 8
CANDIDATES_AT_ONCE = 2**21
MOST_GPU_CANDIDATES = 2048  # of a query, FAISS's limit on GPUs
NUM_QUERIES_AT_ONCE, NUM_ITEMS_AT_ONCE = 512, 1024  # in a search of the whole gallery


def nearest(gallery: Points, queries: Points, k: int, device: Device = "cpu") -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the `k` nearest gallery items of each query, nearest first, ties by index.

    Args:
        gallery: (N, D).
        queries: (Q, D), of the same metric.
        k: number of neighbours, 1 to N.
        device: where FAISS searches; "cuda" shards the gallery over all GPUs, and searches on the CPU for more than 2,040 neighbours.

    Returns:
        indices (Q, k) and similarities (Q, k): cosines, or negative distances for "euclidean".

    Raises:
        EvaluationError: no GPU.
    """
    with one_thread(not is_large(gallery.raw.size * len(queries))):
        return _search(gallery, queries, k, device)


def _search(gallery: Points, queries: Points, k: int, device: Device) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    _, origin_D = around_mean(gallery)
    centred_ND = centred(gallery, origin_D)
    num_candidates = min(len(gallery), k + NUM_SPARE_CANDIDATES)
    index = _flat_index(centred_ND.shape[1], device, num_candidates)
    index.add(centred_ND)
    largest_norm = float(np.linalg.norm(centred_ND, axis=1).max())
    indices_Qk = np.empty((len(queries), k), dtype=np.int64)
    distances_Qk = np.empty((len(queries), k), dtype=np.float32)
    open_queries = []
    for rows in blocks(len(queries), max(1, CANDIDATES_AT_ONCE // num_candidates)):
        which = np.arange(rows.start, rows.stop)
        rows_QD = centred(queries, origin_D, which)
        found_Qm, candidates_Qm = index.search(rows_QD, num_candidates)
        indices_Qk[rows], distances_Qk[rows] = in_order(gallery, queries, which, candidates_Qm, k)
        error_Q = 2 * rounding_error("euclidean", np.linalg.norm(rows_QD, axis=1), largest_norm, rows_QD.shape[1])
        if num_candidates < len(gallery):
            open_queries.append(which[found_Qm[:, -1] - error_Q <= distances_Qk[rows, -1]])
    for some in [part[rows] for part in open_queries for rows in blocks(len(part), NUM_QUERIES_AT_ONCE)]:
        indices_Qk[some], distances_Qk[some] = _among_all(gallery, queries, some, k)
    return indices_Qk, as_similarities(distances_Qk, gallery.metric)


def _among_all(gallery: Points, queries: Points, which_I: NDArray[np.int64], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the first k of the whole gallery by (distance, index) for each of these queries, (I, k).

    Distances are bounded by float64 products around the gallery's mean, where points close together have small norms and so small errors;
    pairs that may be among the first k are computed exactly.
    """
    origin_D = mean(gallery)
    asked_ID = queries.rows(which_I) - origin_D
    indices_Ik, distances_Ik = np.full((len(which_I), k), len(gallery)), np.full((len(which_I), k), np.inf, dtype=np.float32)
    for columns in blocks(len(gallery), NUM_ITEMS_AT_ONCE):
        items_J = np.arange(columns.start, columns.stop)
        low_IJ, high_IJ = bracketed(asked_ID, gallery.rows(columns) - origin_D)
        is_near_IJ = np.maximum(low_IJ, 0) < distances_Ik[:, -1:]  # of ties the earlier items stay
        if columns.start == 0 and len(items_J) > k:
            is_near_IJ &= low_IJ <= np.partition(high_IJ, k - 1, axis=1)[:, k - 1 : k]
        rows_E, columns_E = np.nonzero(is_near_IJ)
        exact_E = squared_distances(gallery, items_J[columns_E], queries, which_I[rows_E])
        indices_Ik, distances_Ik = _merged(indices_Ik, distances_Ik, rows_E, items_J[columns_E], exact_E)
    return indices_Ik, distances_Ik


def _merged(
    indices_Ik: NDArray[np.int64],
    distances_Ik: NDArray[np.float32],
    rows_E: NDArray[np.int64],
    indices_E: NDArray[np.int64],
    distances_E: NDArray[np.float32],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the first k of each row by (distance, index) among old and new entries."""
    num_rows, k = indices_Ik.shape
    rows = np.concatenate([np.arange(num_rows).repeat(k), rows_E])
    indices, distances = np.concatenate([indices_Ik.ravel(), indices_E]), np.concatenate([distances_Ik.ravel(), distances_E])
    order = np.lexsort((indices, distances, rows))
    starts = np.searchsorted(rows[order], np.arange(num_rows))
    first_Ik = order[starts[:, None] + np.arange(k)]
    return indices[first_Ik], distances[first_Ik]


def _flat_index(num_dimensions: int, device: Device, num_candidates: int) -> Any:
    if device == "cuda" and faiss.get_num_gpus() == 0:  # FAISS would silently search on the CPU
        raise EvaluationError("device 'cuda' was asked for but FAISS finds no GPU here; use device: cpu")
    index = faiss.IndexFlatL2(num_dimensions)
    if device == "cpu" or num_candidates > MOST_GPU_CANDIDATES:
        return index
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    return faiss.index_cpu_to_all_gpus(index, options)


def in_order(
    gallery: Points, queries: Points, pending: NDArray[np.int64], candidates_Qm: NDArray[np.int64], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the first k of each query's candidates by (distance, index)."""
    num_queries, num_candidates = candidates_Qm.shape
    flat = squared_distances(gallery, candidates_Qm.ravel(), queries, pending.repeat(num_candidates))
    exact_Qm = flat.reshape(num_queries, num_candidates)
    order_Qk = np.lexsort((candidates_Qm, exact_Qm))[:, :k]
    return np.take_along_axis(candidates_Qm, order_Qk, axis=1), np.take_along_axis(exact_Qm, order_Qk, axis=1)
