"""Recall@K through an approximate FAISS index, with what the approximation costs: for galleries that exact search cannot serve.

The report says so: `is_approximate` is 1, and `index_recall@k` is the share of the exact nearest k that the index found, over a
sample of the queries, ties at the k-th distance counting as found. MAP@R and the other metrics of whole rankings are not estimated.

Shapes: N gallery items, Q queries, S sampled queries, D dimensions, k neighbours.
"""

from typing import Annotated, Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.evaluation.config import EvaluationConfig, Positive
from dml_core.evaluation.geometry import NUM_ROWS_AT_ONCE, Points, as_similarities, blocks, centred, load_points, origin, squared_distances
from dml_core.evaluation.inputs import EmbeddingShard, checked_labels, label_codes
from dml_core.evaluation.neighbours import nearest

NUM_TRAINING_POINTS_PER_LIST = 64


class ApproximateConfig(Config):
    """Which index, and how much of it is searched.

    Attributes:
        index: "ivf_flat" (whole vectors in lists), "ivf_pq" (compressed ones) or "hnsw" (a graph of whole vectors).
        num_lists: inverted lists; fewer where the gallery has not enough items to train them.
        num_probes: lists searched for each query.
        num_code_bytes: bytes of a compressed vector; must divide the dimensions.
        num_links: of each item of the graph.
        num_visited: items of the graph kept in view while a query is searched.
        num_sampled_queries: queries that are searched exactly too.
    """

    index: Literal["ivf_flat", "ivf_pq", "hnsw"]
    num_lists: Positive = 1024
    num_probes: Positive = 32
    num_code_bytes: Positive = 32
    num_links: Annotated[int, Field(ge=2)] = 32
    num_visited: Positive = 128
    num_sampled_queries: Positive = 500


def evaluate_approximately(
    gallery: EmbeddingShard, queries: EmbeddingShard, config: EvaluationConfig, approximation: ApproximateConfig, seed: int = 0
) -> dict[str, float | int]:
    """Recall@K of queries against a gallery, by an index, with the index's own recall; queries without a positive are left out.

    Args:
        gallery: (N, D) and its labels.
        queries: (Q, D) and their labels; none of them is an item of the gallery.
        config: the K and the metric.
        approximation: the index.
        seed: of the sample of queries that are searched exactly too.

    Raises:
        EvaluationError: what cannot be scored, or an index that does not fit the embeddings.
    """
    items, asked = load_points(gallery, config.metric), load_points(queries, config.metric)
    _, (codes_N, codes_Q) = label_codes([checked_labels(gallery.labels), checked_labels(queries.labels)])
    scored = np.flatnonzero(np.isin(codes_Q, codes_N))
    if len(scored) == 0:
        raise EvaluationError("no query has a sample of its class in the gallery, so nothing can be found; check the labels")
    k = min(config.recall_at[-1], len(items))
    origin_D = origin(items)
    index = _build(items, origin_D, approximation)
    found_Sk = index.search(centred(asked, origin_D, scored), k)[1]
    is_hit_Sk = (codes_N[found_Sk] == codes_Q[scored, None]) & (found_Sk >= 0)
    values: dict[str, float | int] = {f"recall@{n}": float(is_hit_Sk[:, :n].any(axis=1).mean()) for n in config.recall_at}
    sample = np.random.default_rng(seed).permutation(len(scored))[: approximation.num_sampled_queries]
    values |= _index_recall(items, asked, scored[sample], found_Sk[sample], config.recall_at)
    counts = {"num_queries": len(asked), "num_queries_without_positive": len(asked) - len(scored)}
    return values | counts | {"is_approximate": 1, "num_sampled_queries": len(sample)}


def _build(items: Points, origin_D: NDArray[np.float64], approximation: ApproximateConfig) -> Any:
    """The index, trained on an evenly spaced part of the gallery and filled block by block."""
    num_dimensions = items.raw.shape[1]
    if approximation.index == "hnsw":
        index = faiss.IndexHNSWFlat(num_dimensions, approximation.num_links)
        index.hnsw.efSearch = approximation.num_visited
    else:
        index = _inverted_lists(num_dimensions, len(items), approximation)
        num_training = min(len(items), NUM_TRAINING_POINTS_PER_LIST * index.nlist)
        index.train(centred(items, origin_D, np.linspace(0, len(items) - 1, num_training, dtype=np.int64)))
        index.nprobe = approximation.num_probes
    for rows in blocks(len(items), NUM_ROWS_AT_ONCE):
        index.add(centred(items, origin_D, np.arange(rows.start, rows.stop)))
    return index


def _inverted_lists(num_dimensions: int, num_items: int, approximation: ApproximateConfig) -> Any:
    num_lists = max(1, min(approximation.num_lists, num_items // NUM_TRAINING_POINTS_PER_LIST))
    quantiser = faiss.IndexFlatL2(num_dimensions)
    if approximation.index == "ivf_flat":
        return faiss.IndexIVFFlat(quantiser, num_dimensions, num_lists)
    if num_dimensions % approximation.num_code_bytes:
        raise EvaluationError(f"num_code_bytes: {approximation.num_code_bytes} does not divide the {num_dimensions} dimensions")
    return faiss.IndexIVFPQ(quantiser, num_dimensions, num_lists, approximation.num_code_bytes, 8)


def _index_recall(
    items: Points, asked: Points, sample: NDArray[np.int64], found_Sk: NDArray[np.int64], recall_at: tuple[int, ...]
) -> dict[str, float]:
    """Share of the exact nearest n that are among the first n found, for each n."""
    num_found = found_Sk.shape[1]
    _, similarities_Sk = nearest(items.raw, asked.raw[sample], num_found, exclude_self=False, metric=items.metric)
    flat = squared_distances(items, np.maximum(found_Sk, 0).ravel(), asked, sample.repeat(num_found))
    found_similarities_Sk = np.where(found_Sk >= 0, as_similarities(flat, items.metric).reshape(found_Sk.shape), -np.inf)
    recalls = {}
    for n in recall_at:
        within = found_similarities_Sk[:, :n] >= similarities_Sk[:, min(n, num_found) - 1, None]
        recalls[f"index_recall@{n}"] = float(within.mean())
    return recalls
