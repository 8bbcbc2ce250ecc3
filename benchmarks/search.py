"""Benchmark the time of one query of an index against bare FAISS in the same run, and the memory.

    python benchmarks/search.py --dimensions 64                                    # a million items, exact
    python benchmarks/search.py --dimensions 512 --kind exact --kind ivf --folder /tmp/indexes   # built once, kept there

The peer is FAISS's own index of the same items, fully in memory: IndexFlatIP for an exact one, else the same index that ours contains.
Compressed vectors have a second peer, IndexRefineFlat over the first: like ours it reranks eight times as many candidates as requested by
the full vectors. Ours and the peers alternate query by query. A search of ours is all that `Index.search` does: checking the query,
normalising it, searching, and for approximate ones the exact scores. The embeddings are drawn: Gaussian classes of ten items each on
average. Memory is the process's own; mapped files are in the system's cache, which processes share and the system frees when memory is
short, and are printed separately.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from measuring import mebibytes
from numpy.typing import NDArray

from dml_core.index.index import NUM_CANDIDATES, Index, read_approximate
from dml_core.index.items import Item
from dml_core.index.layout import APPROXIMATE, INFO_FILE
from dml_core.index.writing import Batch, build_index

NUM_ROWS_AT_ONCE = 50_000
WIDTH = 0.9  # of a class: many of an item's nearest neighbours are of other classes
K = 10
NUM_WARM = 300  # warm-up queries: together they visit every list


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dimensions", type=int, default=64)
    parser.add_argument("--kind", action="append", choices=["exact", "ivf", "pq", "hnsw"], help="repeat for several; exact if left out")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where indexes are kept; those that are there are not built again")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"FAISS {faiss.__version__}, {faiss.omp_get_max_threads()} threads, load {load}")
    with tempfile.TemporaryDirectory() as made:
        results = []
        for kind in arguments.kind or ["exact"]:
            folder = (arguments.folder or Path(made)) / f"{arguments.items}-{arguments.dimensions}-{kind}"
            build(folder, arguments.items, arguments.dimensions, kind)
            results.append(measure(folder, arguments.queries))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def drawn(num_items: int, num_dimensions: int, num_classes: int, seed: int) -> Iterator[NDArray[np.float32]]:
    """Yield embeddings block by block; the classes are the same for every seed."""
    centres_CD = np.random.default_rng(0).standard_normal((num_classes, num_dimensions), dtype=np.float32)
    generator = np.random.default_rng([seed, 1])
    for start in range(0, num_items, NUM_ROWS_AT_ONCE):
        rows_ND = centres_CD[generator.integers(0, num_classes, min(NUM_ROWS_AT_ONCE, num_items - start))]
        rows_ND += np.float32(WIDTH) * generator.standard_normal(rows_ND.shape, dtype=np.float32)
        yield rows_ND


def build(folder: Path, num_items: int, num_dimensions: int, kind: str) -> None:
    if (folder / INFO_FILE).is_file():
        return
    rows = drawn(num_items, num_dimensions, max(1, num_items // 10), seed=0)
    batches = (
        Batch(rows_ND, [Item(f"{number}-{row}.jpg", f"class {row % 100}") for row in range(len(rows_ND))])
        for number, rows_ND in enumerate(rows)
    )
    start = time.perf_counter()
    build_index(folder, batches, "0" * 32, approximate=None if kind == "exact" else kind)
    print(f"{kind}, {num_items:,} items of {num_dimensions} dimensions: built in {time.perf_counter() - start:.1f} s", flush=True)


def measure(folder: Path, num_queries: int) -> dict[str, Any]:
    before, mapped_before = mebibytes("RssAnon"), mebibytes("RssFile")
    start = time.perf_counter()
    index = Index.open(folder)
    opening = time.perf_counter() - start
    opened = mebibytes("RssAnon")
    queries_QD = next(drawn(num_queries, index.num_dimensions, max(1, index.num_items // 10), seed=1))
    index.search(queries_QD[:1], K)
    searched, mapped = mebibytes("RssAnon"), mebibytes("RssFile")
    peer, normalised_QD = peer_of(index), queries_QD / np.linalg.norm(queries_QD, axis=1, keepdims=True)
    with_peer = mebibytes("RssAnon")
    refined = refined_peer_of(index, peer) if index.kind == "pq" else None
    searches = [index.search, peer.search, *([refined.search] if refined is not None else [])]
    others_QD = next(drawn(NUM_WARM, index.num_dimensions, max(1, index.num_items // 10), seed=2))
    others_QD /= np.linalg.norm(others_QD, axis=1, keepdims=True)
    for search in searches:  # warm up all: mapped files are in memory and in this process's tables, threads are started
        search(others_QD, K)
    taken_SQ = np.empty((len(searches), num_queries))
    for number in range(num_queries):
        for place, search in enumerate(searches):
            row_1D = (queries_QD if place == 0 else normalised_QD)[number : number + 1]
            taken_SQ[place, number] = seconds(search, row_1D)
    p50, p95 = (1e3 * np.quantile(taken_SQ, share, axis=1) for share in (0.5, 0.95))
    (ours_p50, faiss_p50, *refined_p50), (ours_p95, faiss_p95, *_) = p50.tolist(), p95.tolist()
    result = {
        "kind": index.kind,
        "items": index.num_items,
        "dimensions": index.num_dimensions,
        "opening_ms": 1e3 * opening,
        "ours_p50_ms": ours_p50,
        "ours_p95_ms": ours_p95,
        "faiss_p50_ms": faiss_p50,
        "faiss_p95_ms": faiss_p95,
        "ratio_p50": ours_p50 / faiss_p50,
        "refined_p50_ms": refined_p50[0] if refined_p50 else None,
        "refined_ratio_p50": ours_p50 / refined_p50[0] if refined_p50 else None,
        "opened_mib": opened - before,
        "searched_mib": searched - before,
        "mapped_mib": mapped - mapped_before,
        "faiss_mib": with_peer - searched,
        "disk_mib": index.nbytes / 2**20,
        "recalls": None if index.info.found is None else index.info.found.recalls,
    }
    figures = ", ".join(f"{name} {value:.4g}" for name, value in result.items() if isinstance(value, float))
    print(f"{index.kind}, {index.num_items:,} items of {index.num_dimensions} dimensions, one query for {K}: {figures}")
    print(f"  {'exact' if index.info.found is None else index.info.found}", flush=True)
    return result


def peer_of(index: Index) -> Any:
    """Return FAISS's index of the same items, in memory."""
    if index.kind != "exact":
        return read_approximate(index.info.path(index.folder, APPROXIMATE), mapped=False)
    peer = faiss.IndexFlatIP(index.num_dimensions)
    peer.add(np.asarray(index.vectors_ND))
    return peer


def refined_peer_of(index: Index, peer: Any) -> Any:
    """Return FAISS's index that reranks another index's candidates by the full vectors, also in memory."""
    refined = faiss.IndexRefineFlat(peer, faiss.swig_ptr(np.ascontiguousarray(index.vectors_ND)))
    refined.k_factor = NUM_CANDIDATES
    return refined


def seconds(search: Callable[[Any, int], Any], row_1D: NDArray[np.float32]) -> float:
    start = time.perf_counter()
    search(row_1D, K)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
