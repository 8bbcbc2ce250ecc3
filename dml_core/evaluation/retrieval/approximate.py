"""Recall@K through an approximate FAISS index, with its loss in recall, for galleries too large for exact search.

The report marks this: `is_approximate` is 1, and `index_recall@k` is the share of the exact nearest k that the index found, over a sample
of the queries; ties at the k-th distance count as found. MAP@R and other metrics of whole rankings are not estimated.

Shapes: N gallery items, Q queries, S sampled queries, D dimensions, k neighbours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.evaluation.config import EvaluationConfig, Metric, Positive
from dml_core.evaluation.inputs import EmbeddingShard, shard_codes
from dml_core.evaluation.retrieval.geometry import (
    NUM_ROWS_AT_ONCE,
    Points,
    as_points,
    blocks,
    centred,
    load_points,
    origin,
    squared_distances,
)
from dml_core.evaluation.retrieval.neighbours import nearest

NUM_TRAINING_POINTS_PER_LIST = 64
NUM_CODES = 256  # of each byte of a compressed vector; FAISS trains them on at least as many items


class ApproximateConfig(Config):
    """Settings of the approximate index and its search.

    Attributes:
        index: "ivf_flat" (whole vectors in lists), "ivf_pq" (compressed vectors in lists) or "hnsw" (a graph of whole vectors).
        num_lists: number of inverted lists; fewer if the gallery has too few items to train them.
        num_probes: lists searched for each query.
        num_code_bytes: bytes of a compressed vector; must divide the dimensions.
        num_links: links of each item of the graph.
        num_visited: candidate items of the graph kept during a search.
        num_sampled_queries: number of queries that are also searched exactly.
    """

    index: Literal["ivf_flat", "ivf_pq", "hnsw"]
    num_lists: Positive = 1024
    num_probes: Positive = 32
    num_code_bytes: Positive = 32
    num_links: Annotated[int, Field(ge=2, le=1024)] = 32
    num_visited: Annotated[int, Field(ge=1, lt=2**31)] = 128
    num_sampled_queries: Positive = 500


READ_BY_INDEX = {
    "ivf_flat": {"num_lists", "num_probes", "num_sampled_queries"},
    "ivf_pq": {"num_lists", "num_probes", "num_code_bytes", "num_sampled_queries"},
    "hnsw": {"num_links", "num_visited", "num_sampled_queries"},
}


def evaluate_approximately(
    gallery: Sequence[EmbeddingShard],
    config: EvaluationConfig,
    approximation: ApproximateConfig,
    queries: Sequence[EmbeddingShard] | None = None,
) -> dict[str, float | int]:
    """Return Recall@K with an index, and the index's own recall; queries without a positive are excluded.

    Args:
        gallery: its shards; one at a time is in memory, besides the index.
        config: the K and the metric; the device must be "cpu".
        approximation: settings of the index.
        queries: their shards; None if the gallery's items are the queries, each excluded from its own gallery by index.

    Raises:
        EvaluationError: the embeddings cannot be scored, the index does not fit them, or the device is another.
    """
    if config.device != "cpu":
        raise EvaluationError(f"device '{config.device}' was asked for but an approximate index is searched on the CPU; use device: cpu")
    is_self = queries is None
    _, gallery_codes, query_codes = shard_codes(gallery, queries)
    codes_N, codes_Q = np.concatenate(gallery_codes), np.concatenate(query_codes)
    scored = np.flatnonzero(np.bincount(codes_N, minlength=int(codes_Q.max()) + 1)[codes_Q] > is_self)
    if len(scored) == 0:
        raise EvaluationError("no query has a sample of its class in the gallery, so nothing can be found; check the labels")
    k = min(config.recall_at[-1], len(codes_N) - is_self)
    origin_D = origin(load_points(gallery[0], config.metric))
    index = build(gallery, len(codes_N), origin_D, config.metric, approximation)
    sample = np.sort(np.random.default_rng(0).permutation(scored)[: approximation.num_sampled_queries])
    neighbours, sampled_rows = [], []
    for points, first in _loaded(gallery if queries is None else queries, config.metric):
        if points.raw.shape[1] != index.d:
            raise EvaluationError(f"embeddings of {points.raw.shape[1]} and {index.d} dimensions cannot be compared")
        own = np.arange(first, first + len(points)) if is_self else None
        neighbours += [search_others(index.search, centred(points, origin_D), own, k)]
        sampled_rows += [points.raw[sample[(sample >= first) & (sample < first + len(points))] - first]]
    neighbours_Qk = np.concatenate(neighbours)
    is_hit_Sk = (codes_N[neighbours_Qk[scored]] == codes_Q[scored, None]) & (neighbours_Qk[scored] >= 0)
    values: dict[str, float | int] = {f"recall@{n}": float(is_hit_Sk[:, :n].any(axis=1).mean()) for n in config.recall_at}
    asked = as_points(np.concatenate(sampled_rows), config.metric)
    of_sample = {n: neighbours_Qk[sample, :n] for n in config.recall_at}
    values |= index_recall(gallery, asked, sample if is_self else None, of_sample)
    counts = {"num_queries": len(codes_Q), "num_queries_without_positive": len(codes_Q) - len(scored)}
    return values | counts | {"is_approximate": 1, "num_sampled_queries": len(sample)}


def _loaded(shards: Sequence[EmbeddingShard], metric: Metric) -> Iterator[tuple[Points, int]]:
    """Yield the points of each shard with the index of its first item."""
    first = 0
    for shard in shards:
        points = load_points(shard, metric)
        yield points, first
        first += len(points)


def build(
    gallery: Sequence[EmbeddingShard], num_items: int, origin_D: NDArray[np.float64], metric: Metric, approximation: ApproximateConfig
) -> Any:
    """Build the index, trained on an evenly spaced part of the gallery and filled shard by shard."""
    if approximation.index == "hnsw":
        index = faiss.IndexHNSWFlat(len(origin_D), approximation.num_links)
        index.hnsw.efSearch = approximation.num_visited
    else:
        index = _inverted_lists(len(origin_D), num_items, approximation)
        index.cp.min_points_per_centroid = 1  # without FAISS's warning about few training points: `index_recall` measures the loss
        least = NUM_CODES if approximation.index == "ivf_pq" else 0
        num_wanted = max(least, NUM_TRAINING_POINTS_PER_LIST * index.nlist)
        wanted = np.linspace(0, num_items - 1, min(num_items, num_wanted), dtype=np.int64)
        training = []
        for points, first in _loaded(gallery, metric):
            training.append(centred(points, origin_D, wanted[(wanted >= first) & (wanted < first + len(points))] - first))
        index.train(np.concatenate(training))
        index.nprobe = approximation.num_probes
    for points, _ in _loaded(gallery, metric):
        for rows in blocks(len(points), NUM_ROWS_AT_ONCE):
            index.add(centred(points, origin_D, np.arange(rows.start, rows.stop)))
    return index


def search_others(
    search: Callable[[NDArray[np.float32], int], tuple[Any, NDArray[np.int64]]],
    rows_QD: NDArray[np.float32],
    self_index_Q: NDArray[np.int64] | None,
    k: int,
) -> NDArray[np.int64]:
    """Return the k items that `search` finds for each query, (Q, k), padded with -1; queries that are items `self_index_Q` are excluded."""
    if self_index_Q is None:
        return search(rows_QD, k)[1]
    found_Qm = search(rows_QD, k + 1)[1]
    is_self_Qm = found_Qm == self_index_Q[:, None]
    return np.take_along_axis(found_Qm, np.argsort(is_self_Qm, axis=1, kind="stable")[:, :k], axis=1)


def _inverted_lists(num_dimensions: int, num_items: int, approximation: ApproximateConfig) -> Any:
    num_lists = max(1, min(approximation.num_lists, num_items // NUM_TRAINING_POINTS_PER_LIST))
    quantiser = faiss.IndexFlatL2(num_dimensions)
    if approximation.index == "ivf_flat":
        return faiss.IndexIVFFlat(quantiser, num_dimensions, num_lists)
    if num_items < NUM_CODES:
        raise EvaluationError(f"index 'ivf_pq' needs {NUM_CODES} gallery items to train its codes, found {num_items}; search exactly")
    if num_dimensions % approximation.num_code_bytes:
        raise EvaluationError(f"num_code_bytes: {approximation.num_code_bytes} does not divide the {num_dimensions} dimensions")
    index = faiss.IndexIVFPQ(quantiser, num_dimensions, num_lists, approximation.num_code_bytes, 8)
    index.pq.cp.min_points_per_centroid = 1
    return index


def index_recall(
    gallery: Sequence[EmbeddingShard], asked: Points, self_index_S: NDArray[np.int64] | None, found: Mapping[int, NDArray[np.int64]]
) -> dict[str, float]:
    """Return the share of the exact nearest n that the index found, for each n.

    Args:
        gallery: all items.
        asked: the sampled queries.
        self_index_S: gallery indices of the queries, or None.
        found: n -> items found for it, (S, n), narrower if there are fewer items, padded with -1.
    """
    widths = [found_Sn.shape[1] for found_Sn in found.values()]
    found_Sm = np.concatenate(list(found.values()), axis=1)
    found_distances_Sm = np.full(found_Sm.shape, np.inf)
    nearest_Sk = np.empty((len(found_Sm), 0))  # distances: cosines of a nearly collapsed network are equal in float32
    for points, first in _loaded(gallery, asked.metric):
        num_wanted = min(len(points), max(widths) + (self_index_S is not None))
        indices_Sw, _ = nearest(points, asked, num_wanted)
        queries = np.arange(len(found_Sm)).repeat(num_wanted)
        distances_Sw = squared_distances(points, indices_Sw.ravel(), asked, queries).reshape(indices_Sw.shape)
        if self_index_S is not None:
            distances_Sw[indices_Sw + first == self_index_S[:, None]] = np.inf
        nearest_Sk = np.sort(np.concatenate([nearest_Sk, distances_Sw], axis=1), axis=1)[:, : max(widths)]
        rows, columns = np.nonzero((found_Sm >= first) & (found_Sm < first + len(points)))
        found_distances_Sm[rows, columns] = squared_distances(points, found_Sm[rows, columns] - first, asked, rows)
    parts = np.split(found_distances_Sm, np.cumsum(widths)[:-1], axis=1)
    return {
        f"index_recall@{n}": float((part_Sn <= nearest_Sk[:, part_Sn.shape[1] - 1, None]).mean())
        for n, part_Sn in zip(found, parts, strict=True)
    }
