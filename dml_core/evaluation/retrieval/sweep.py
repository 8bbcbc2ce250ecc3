"""The exact evaluator's sweep: every query against every gallery item, in tiles, with bounded memory.

Tiles in float32 or float64 decide every pair that their rounding error allows; pairs too close to decide are recomputed by
`geometry.squared_distances`. The result is therefore that of the exact distances, for any tile shape, number of threads and device. In
self-retrieval the matrix is symmetric and each tile serves the queries of both its sides.

If positives are a large share of a gallery in memory, counting saves nothing, and `sorted_rows` sorts instead.

The gallery is read in shards, one in memory at a time; a gallery in memory is a single shard.

Shapes: N gallery items, Q queries, P positives of all queries, E entries of a tile.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dml_core.errors import EvaluationError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.inputs import EmbeddingShard, shard_codes
from dml_core.evaluation.retrieval.geometry import (
    NARROW_ROUNDING,
    Points,
    all_squared_distances,
    around_mean,
    blocks,
    load_points,
    narrow_error,
    rounding_error,
    squared_distances,
)
from dml_core.evaluation.retrieval.metrics import QueryScores, concatenate
from dml_core.evaluation.retrieval.ranking import RankCounter
from dml_core.evaluation.retrieval.sorted_rows import score_rows
from dml_core.evaluation.retrieval.tiles import (
    OFFSET,
    STRIP,
    Side,
    as_side,
    common_classes,
    compare,
    part,
    tile,
    usable_device,
)
from dml_core.evaluation.threads import BlockThreads, is_large, one_thread

NUM_SAMPLE_ITEMS = 256
NUM_SAMPLE_QUERIES = 512
MOST_UNDECIDED = 0.005  # share of pairs above which narrow tiles take longer, since each of these is computed again by itself
BYTES_PER_POSITIVE = 72  # state of a query
BYTES_PER_ENTRY = 64  # of a tile, if every entry must be placed among the positives
BYTES_PER_ENTRY_ON_GPU = 16  # of its memory; few entries are placed, so larger tiles wait less often
ENTRIES_AT_ONCE = 2**18
PAIRS_AT_ONCE = 2**11
LARGEST_TILE = 4096
MANY_POSITIVES = 200  # of a query on average: above this they are too dense for float32 to locate an item among them
LARGE_SHARE = 1 / 16  # positives of a query on average, relative to the gallery: above this sorting rows is faster


class Shard(NamedTuple):
    """A part of the gallery: a function that loads its points, and the classes of its items."""

    load: Callable[[], Points]
    codes: NDArray[np.int64]


def retrieve(
    gallery: Sequence[EmbeddingShard], config: EvaluationConfig, queries: Sequence[EmbeddingShard] | None = None
) -> tuple[QueryScores, NDArray[np.int64], NDArray[Any]]:
    """Return the scores of all queries, their class codes, and the label of each code.

    Without `queries` the gallery's items are the queries.

    Raises:
        EvaluationError: embeddings or labels cannot be scored, or the device is missing.
    """
    device = usable_device(config.device)
    names, gallery_codes, query_codes = shard_codes(gallery, queries)
    shards = [Shard(partial(load_points, shard, config.metric), codes) for shard, codes in zip(gallery, gallery_codes, strict=True)]
    scores, first = [], 0
    for shard, codes_Q in zip(gallery if queries is None else queries, query_codes, strict=True):
        points = load_points(shard, config.metric)
        self_index_Q = np.arange(first, first + len(points)) if queries is None else None
        first += len(points)
        scores.append(score_queries(shards, points, codes_Q, self_index_Q, config.max_block_bytes, device))
    return concatenate(scores), np.concatenate(query_codes), names


def score_queries(
    gallery: Sequence[Shard],
    queries: Points,
    codes_Q: NDArray[np.int64],
    self_index_Q: NDArray[np.int64] | None,
    max_block_bytes: int,
    device: torch.device,
) -> QueryScores:
    """Return the scores of every query, in order.

    Args:
        gallery: its shards, in order.
        queries: (Q, D).
        codes_Q: their classes, numbered like the gallery's.
        self_index_Q: gallery index of each query, which is excluded from its comparison; None if queries are not gallery items.
        max_block_bytes: memory limit of a tile and of the state of a group of queries, each.
        device: where tiles are computed.
    """
    num_codes = 1 + max(int(codes.max()) for codes in [codes_Q, *(shard.codes for shard in gallery)])
    class_sizes = sum((np.bincount(shard.codes, minlength=num_codes) for shard in gallery), np.zeros(num_codes, dtype=np.int64))
    num_positives_Q = class_sizes[codes_Q] - (self_index_Q is not None)
    is_dense = num_positives_Q.mean() > max(MANY_POSITIVES, LARGE_SHARE * sum(len(shard.codes) for shard in gallery))
    if is_dense and len(gallery) == 1 and device.type == "cpu":
        items = gallery[0].load()
        _check_dimensions(queries, items)
        return score_rows(items, gallery[0].codes, queries, codes_Q, self_index_Q, max_block_bytes)
    groups = _groups(codes_Q, num_positives_Q, max_block_bytes)
    is_symmetric = self_index_Q is not None and len(groups) == len(gallery) == 1 and len(queries) == len(gallery[0].codes)
    queries, origin_D = around_mean(queries)
    dtype = tile_dtype(device, float(num_positives_Q.mean()))
    is_narrow = dtype == np.float32 and _can_be_narrow(queries, sum(len(shard.codes) for shard in gallery), device)
    first_rank, average_precision, r_precision = np.zeros((3, len(queries)))
    for index in groups:
        group = as_side(queries, index, codes_Q[index], origin_D, device, dtype, is_narrow)
        with one_thread(not is_narrow):
            distances = _positive_distances(gallery, group, class_sizes, None if self_index_Q is None else self_index_Q[index])
        counter = RankCounter(distances, np.maximum(num_positives_Q[index], 1))
        if is_narrow and _undecided_share(group, counter) > MOST_UNDECIDED:
            is_narrow, group = False, replace(group, narrow=None, losses=np.zeros(len(index)))
        sides = [group] if is_symmetric else (_side(shard, origin_D, device, dtype, is_narrow) for shard in gallery)
        # narrow tiles are torch's products; numpy's have threads of their own, and torch's would busy-wait on the cores needed by them
        with BlockThreads(is_narrow) as threads, one_thread(not is_narrow):
            _sweep(sides, group, counter, max_block_bytes, threads)
        first_rank[index], average_precision[index], r_precision[index] = counter.scores()
    return QueryScores(num_positives_Q, first_rank.astype(np.int64), average_precision, r_precision)


def tile_dtype(device: torch.device, mean_positives: float) -> type[np.floating[Any]]:
    """Return float32 if its error bound holds and leaves few pairs undecided, else float64."""
    return np.float32 if device.type == "cpu" and mean_positives <= MANY_POSITIVES else np.float64


def _can_be_narrow(queries: Points, num_items: int, device: torch.device) -> bool:
    """Return whether tiles of bfloat16 save time and their bound holds."""
    work, num_dimensions = len(queries) * num_items * queries.raw.shape[1], queries.raw.shape[1]
    has_instructions = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return queries.metric == "cosine" and has_instructions and is_large(work) and num_dimensions <= 2**14


def _undecided_share(queries: Side, counter: RankCounter) -> float:
    """Return the share of pairs whose order to the query's first positive narrow tiles leave open, from a sample of queries as both sides.

    It is near 0 if positives are among the nearest items, as after training.
    """
    rows = np.unique(np.linspace(0, len(queries.codes) - 1, min(len(queries.codes), NUM_SAMPLE_QUERIES), dtype=np.int64))
    sample = part(queries, rows)
    near_QQ = (sample.vectors @ sample.vectors.T).numpy()
    first_Q = counter.distances[counter.starts[:-1][rows]]
    error_Q = narrow_error(sample.losses, float(sample.losses.max()), sample.vectors.shape[1])
    is_open_QQ = np.abs(near_QQ - (OFFSET["cosine"] - first_Q[:, None] / 2)) <= error_Q[:, None] + NARROW_ROUNDING * np.abs(near_QQ)
    return float((is_open_QQ & (sample.codes[:, None] != sample.codes)).mean())


def _check_dimensions(queries: Points, items: Points) -> None:
    if items.raw.shape[1] != queries.raw.shape[1]:
        raise EvaluationError(f"embeddings of {queries.raw.shape[1]} and {items.raw.shape[1]} dimensions cannot be compared")


def _groups(codes_Q: NDArray[np.int64], num_positives_Q: NDArray[np.int64], max_bytes: int) -> list[NDArray[np.int64]]:
    """Return queries in the order of their classes, in groups whose state takes at most `max_bytes` (or a single query that needs more)."""
    order_Q = np.argsort(codes_Q, kind="stable")
    ends_Q = np.cumsum(BYTES_PER_POSITIVE * np.maximum(num_positives_Q[order_Q], 1))
    groups, start = [], 0
    while start < len(order_Q):
        used = ends_Q[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends_Q, used + max_bytes, side="right")))
        groups.append(order_Q[start:stop])
        start = stop
    return groups


def _side(shard: Shard, origin_D: NDArray[np.float64], device: torch.device, dtype: type[np.floating[Any]], is_narrow: bool) -> Side:
    index = np.argsort(shard.codes, kind="stable")
    return as_side(shard.load(), index, shard.codes[index], origin_D, device, dtype, is_narrow)


def _positive_distances(
    gallery: Sequence[Shard], queries: Side, class_sizes: NDArray[np.int64], self_index_Q: NDArray[np.int64] | None
) -> NDArray[np.float32]:
    """Return the distances of each query's positives, query by query and ascending; a query without a positive gets a placeholder at 0.

    Hardly any item is before the placeholder, so such a query costs almost nothing, and its score is ignored.
    """
    sizes_Q = np.maximum(class_sizes[queries.codes], 1)
    starts = np.concatenate([[0], np.cumsum(sizes_Q)])
    distances = np.full(starts[-1], np.inf, dtype=np.float32)
    num_filled, first = np.zeros_like(class_sizes), 0
    for shard in gallery:
        points, order = shard.load(), np.argsort(shard.codes, kind="stable")
        _check_dimensions(queries.points, points)
        for code, rows, columns in common_classes(queries.codes, shard.codes[order]):
            block = all_squared_distances(queries.points, queries.index[rows], points, order[columns])
            if self_index_Q is not None:
                block[self_index_Q[rows, None] == first + order[columns]] = np.inf
            of_class = distances[starts[rows.start] : starts[rows.stop]].reshape(len(block), -1)
            of_class[:, num_filled[code] : num_filled[code] + block.shape[1]] = block
            num_filled[code] += block.shape[1]
        first += len(shard.codes)
    for _, rows, _ in common_classes(queries.codes, queries.codes):
        distances[starts[rows.start] : starts[rows.stop]].reshape(rows.stop - rows.start, -1).sort(axis=1)
    distances[starts[:-1][np.isinf(distances[starts[:-1]])]] = 0
    return distances[np.isfinite(distances)]


def _sweep(sides: Iterable[Side], queries: Side, counter: RankCounter, max_block_bytes: int, threads: BlockThreads) -> None:
    """Count every pair of a query and an item of `sides`; if the side is `queries` itself, each tile serves both its sides."""
    bytes_per_entry = BYTES_PER_ENTRY if queries.vectors.is_cpu else BYTES_PER_ENTRY_ON_GPU
    size = min(LARGEST_TILE, math.isqrt(max_block_bytes // threads.number // bytes_per_entry))
    size = max(size // STRIP * STRIP, min(size, STRIP))
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(threads.number):
        buffers.put(torch.empty(size * size, device=queries.vectors.device, dtype=queries.vectors.dtype))

    def count(block: tuple[Side, slice, slice]) -> None:
        items, rows, columns = block
        left, right, buffer = part(queries, rows), part(items, columns), buffers.get()
        try:
            near = tile(left, right, buffer)
            _count_tile(counter, rows, left, right, near, axis=0)
            if items is queries and columns.start > rows.start:
                _count_tile(counter, columns, right, left, near, axis=1)
        finally:  # or, after an error, the other threads would wait for it for ever
            buffers.put(buffer)

    for number, items in enumerate(sides):
        if number == 0:
            _find_useless(items, queries, counter, size)
        pairs = product(blocks(len(queries.codes), size), blocks(len(items.codes), size))
        tiles = ((items, rows, columns) for rows, columns in pairs if items is not queries or columns.start >= rows.start)
        for _ in threads.map(count, tiles):
            pass


def _find_useless(items: Side, queries: Side, counter: RankCounter, size: int) -> None:
    """Use a few items, evenly spaced over the classes, to find positives that rank beyond R, which the sweep need not place."""
    sample = part(items, np.unique(np.linspace(0, len(items.codes) - 1, min(size, NUM_SAMPLE_ITEMS), dtype=np.int64)))
    buffer = torch.empty(size * len(sample.codes), device=queries.vectors.device, dtype=queries.vectors.dtype)
    for rows in blocks(len(queries.codes), size):
        left = part(queries, rows)
        _count_tile(counter, rows, left, sample, tile(left, sample, buffer), axis=0)
    counter.forget_counts()


def _count_tile(counter: RankCounter, rows: slice, queries: Side, items: Side, near: Tensor, axis: int) -> None:
    """Count the items of one tile for the queries `rows`, which are along `axis` of the tile."""
    offset, dtype = OFFSET[queries.points.metric], np.float64 if near.dtype == torch.float64 else np.float32
    full_error_Q = rounding_error(queries.points.metric, queries.norms, float(items.norms.max()), queries.vectors.shape[1], dtype)
    is_narrow = near.dtype == torch.bfloat16
    error_Q = narrow_error(queries.losses, float(items.losses.max()), queries.vectors.shape[1]) if is_narrow else full_error_Q
    rounding = NARROW_ROUNDING if is_narrow else 0.0
    first_Q, last_Q = counter.bounds(rows)
    upper_Q = offset - first_Q.astype(np.float64) / 2 + error_Q
    lower_Q = offset - np.nextafter(last_Q, np.float32(np.inf)).astype(np.float64) / 2 - error_Q  # what rounds to the last ties with it
    upper_Q, lower_Q = upper_Q + rounding * np.abs(upper_Q), lower_Q - rounding * np.abs(lower_Q)
    entries = compare(near, upper_Q.astype(dtype), lower_Q.astype(dtype), axis)
    local_E, items_E = (entries.rows, entries.columns) if axis == 0 else (entries.columns, entries.rows)
    points_E = np.empty(len(local_E), dtype=np.int64)
    for some in blocks(len(local_E), ENTRIES_AT_ONCE):
        queries_E, distances_E = local_E[some] + rows.start, 2 * (offset - entries.nearness[some].astype(np.float64))
        slack_E = 2 * (error_Q[local_E[some]] + rounding * np.abs(entries.nearness[some]))
        low_E = counter.insertion_points(rows, queries_E, (distances_E - slack_E).astype(np.float32))
        unsure = np.flatnonzero(counter.are_nearer(low_E, queries_E, (distances_E + slack_E).astype(np.float32)))
        if is_narrow:  # pair by pair in float32, which leaves few
            pairs_Q, slack_U = local_E[some][unsure], 2 * full_error_Q[local_E[some][unsure]]
            distances_U = 2 * (offset - _cosines(queries, pairs_Q, items, items_E[some][unsure]))
            low_E[unsure] = counter.insertion_points(rows, queries_E[unsure], (distances_U - slack_U).astype(np.float32))
            is_open_U = counter.are_nearer(low_E[unsure], queries_E[unsure], (distances_U + slack_U).astype(np.float32))
            unsure = unsure[is_open_U]
        exact = squared_distances(queries.points, queries.index[local_E[some][unsure]], items.points, items.index[items_E[some][unsure]])
        low_E[unsure] = counter.insertion_points(rows, queries_E[unsure], exact)
        points_E[some] = low_E
    counter.add(rows, entries.num_above, local_E + rows.start, points_E)


def _cosines(queries: Side, queries_E: NDArray[np.int64], items: Side, items_E: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return products of pairs in float32, (E,)."""
    cosines_E = np.empty(len(queries_E))
    for some in blocks(len(queries_E), PAIRS_AT_ONCE):
        left_ED, right_ED = queries.vectors[torch.from_numpy(queries_E[some])], items.vectors[torch.from_numpy(items_E[some])]
        cosines_E[some] = left_ED.mul_(right_ED).sum(dim=1).numpy()
    return cosines_E
