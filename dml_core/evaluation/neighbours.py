"""Exact nearest neighbours: FAISS finds the candidates, the distance of `geometry` puts them in order.

Equally near items come in the order of their index. FAISS's float32 search is trusted only as far as its rounding allows: where the
last candidate it returns is no farther than the k-th neighbour within that error, the query is searched again among more candidates.

Shapes: N gallery items, Q queries, D dimensions, k neighbours, m candidates.
"""

from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dml_core.errors import EvaluationError
from dml_core.evaluation.config import Device, Metric
from dml_core.evaluation.geometry import Points, as_points, as_similarities, centred, origin, rounding_error, squared_distances
from dml_core.evaluation.inputs import checked_embeddings

NUM_SPARE_CANDIDATES = 8


def nearest(
    gallery: ArrayLike, queries: ArrayLike, k: int, exclude_self: bool, metric: Metric = "cosine", device: Device = "cpu"
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The `k` nearest gallery items of each query, nearest first, equally near ones by index.

    Args:
        gallery: (N, D).
        queries: (Q, D).
        k: how many.
        exclude_self: query i is gallery item i and is left out of its own neighbours; duplicates of it stay.
        metric: similarities are cosines, or negative distances for "euclidean".
        device: where FAISS searches; "cuda" shards the gallery over all GPUs.

    Returns:
        indices (Q, k) and similarities (Q, k).

    Raises:
        EvaluationError: fewer than k items to choose from, sizes that do not fit, embeddings that cannot be compared, or no GPU.
    """
    gallery_points = as_points(checked_embeddings(gallery, "gallery"), metric)
    query_points = as_points(checked_embeddings(queries, "queries"), metric)
    if gallery_points.raw.shape[1] != query_points.raw.shape[1]:
        raise EvaluationError(f"gallery has {gallery_points.raw.shape[1]} dimensions but queries {query_points.raw.shape[1]}")
    if exclude_self and len(gallery_points) != len(query_points):
        raise EvaluationError(f"exclude_self needs the queries to be the gallery; found {len(query_points)} and {len(gallery_points)} rows")
    num_choices = len(gallery_points) - exclude_self
    if not 1 <= k <= num_choices:
        raise EvaluationError(f"k = {k} neighbours were asked for; this gallery offers 1 to {num_choices}")
    return _search(gallery_points, query_points, k, exclude_self, device)


def _search(gallery: Points, queries: Points, k: int, exclude_self: bool, device: Device) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    origin_D = origin(gallery)
    centred_ND = centred(gallery, origin_D)
    index = _flat_index(centred_ND.shape[1], device)
    index.add(centred_ND)
    largest_norm = float(np.linalg.norm(centred_ND, axis=1).max())
    indices_Qk = np.empty((len(queries), k), dtype=np.int64)
    distances_Qk = np.empty((len(queries), k), dtype=np.float32)
    pending = np.arange(len(queries))
    num_candidates = min(len(gallery), k + exclude_self + NUM_SPARE_CANDIDATES)
    while len(pending):
        rows_QD = centred(queries, origin_D, pending)
        found_Qm, candidates_Qm = index.search(rows_QD, num_candidates)
        indices_Qk[pending], distances_Qk[pending] = _in_order(gallery, queries, pending, candidates_Qm, k, exclude_self)
        if num_candidates == len(gallery):
            break
        error_Q = 2 * rounding_error("euclidean", np.linalg.norm(rows_QD, axis=1), largest_norm, rows_QD.shape[1])
        pending = pending[found_Qm[:, -1] - error_Q <= distances_Qk[pending, -1]]
        num_candidates = min(len(gallery), 4 * num_candidates)
    return indices_Qk, as_similarities(distances_Qk, gallery.metric)


def _flat_index(num_dimensions: int, device: Device) -> Any:
    index = faiss.IndexFlatL2(num_dimensions)
    if device == "cpu":
        return index
    if faiss.get_num_gpus() == 0:  # FAISS itself would search on the CPU without a word
        raise EvaluationError("device 'cuda' was asked for but FAISS finds no GPU here; use device: cpu")
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    return faiss.index_cpu_to_all_gpus(index, options)


def _in_order(
    gallery: Points, queries: Points, pending: NDArray[np.int64], candidates_Qm: NDArray[np.int64], k: int, exclude_self: bool
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The first k of each query's candidates by (distance, index), self left out."""
    num_queries, num_candidates = candidates_Qm.shape
    flat = squared_distances(gallery, candidates_Qm.ravel(), queries, pending.repeat(num_candidates))
    exact_Qm = flat.reshape(num_queries, num_candidates)
    if exclude_self:
        exact_Qm[candidates_Qm == pending[:, None]] = np.inf
    order_Qk = np.lexsort((candidates_Qm, exact_Qm))[:, :k]
    return np.take_along_axis(candidates_Qm, order_Qk, axis=1), np.take_along_axis(exact_Qm, order_Qk, axis=1)
