"""Benchmark the evaluator's speed and memory. Every figure is a ratio to a named peer in the same run.

    python benchmarks/evaluation.py retrieval --size sop     # exact Recall@{1,10,100,1000} + MAP@R against FAISS top-1000 and PML
    python benchmarks/evaluation.py clustering --size sop    # k-means against FAISS's and scikit-learn's
    python benchmarks/evaluation.py million                  # a gallery of a million items, exact and approximate
    python benchmarks/evaluation.py retrieval --alike        # all embeddings in nearly one direction, as of an untrained network

The embeddings are generated: Gaussian classes of unequal sizes, wide enough that some of the nearest neighbours are wrong.
"""

import argparse
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from measuring import forget_peak, gaussian_classes, mebibytes
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from dml_core.evaluation.clustering import lloyd
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import EmbeddingShard, evaluate_shards
from dml_core.evaluation.kmeans_init import first_clusters
from dml_core.evaluation.retrieval.approximate import ApproximateConfig, evaluate_approximately

Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]
SIZES = {  # samples and classes of the test sets, width of a class
    "sop": (60_502, 11_316, 2.2),
    "inshop": (26_830, 3_985, 2.2),
    "cub": (5_924, 100, 4.0),
    "half": (12_000, 2_000, 2.2),
    "tiny": (2_000, 300, 2.2),
    "two": (10_000, 2, 6.0),
    "five": (10_000, 5, 6.0),
}
NUM_LLOYD_ITERATIONS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["retrieval", "clustering", "million"])
    parser.add_argument("--size", choices=SIZES, default="sop")
    parser.add_argument("--gallery", type=int, default=1_000_000, help="items of the large gallery")
    parser.add_argument("--limit", type=float, default=240, help="seconds for scikit-learn's k-means with its own first centres")
    parser.add_argument("--alike", action="store_true", help="add a direction that all embeddings have in common, ten times their length")
    arguments = parser.parse_args()
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{torch.get_num_threads()} threads, FAISS {faiss.__version__}, torch {torch.__version__}, load {load}")
    if arguments.question == "million":
        million(arguments.gallery)
    else:
        if arguments.alike and arguments.question != "retrieval":
            parser.error("--alike is for retrieval")
        arrays = gaussian_classes(*SIZES[arguments.size], num_dimensions=512, common=10.0 * arguments.alike)
        if arguments.question == "clustering":
            clustering(arrays, SIZES[arguments.size][1], arguments.size, arguments.limit)
        else:
            retrieval(*arrays)


def measured(name: str, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result and the seconds of `work`; print them with the peak resident memory above the initial one."""
    forget_peak()
    before, start, start_cpu = mebibytes("VmRSS"), time.perf_counter(), time.process_time()
    result = work()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    peak = mebibytes("VmHWM") - before
    print(f"{name}: {seconds:.2f} s ({cpu_seconds:.2f} s of CPU), peak memory {peak:.0f} MiB beyond the embeddings", flush=True)
    return result, seconds


def retrieval(embeddings: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    config = EvaluationConfig(recall_at=(1, 10, 100, 1000), clustering=False)
    values, ours = measured(
        "ours, Recall@{1,10,100,1000} and MAP@R", lambda: evaluate_shards([EmbeddingShard(lambda: embeddings, labels)], config)
    )
    print({name: round(value, 5) for name, value in values.items()})
    index = faiss.IndexFlatIP(embeddings.shape[1])
    index.add(embeddings)
    _, theirs = measured("FAISS IndexFlatIP, top 1000", lambda: index.search(embeddings, 1000))
    print(f"ratio to FAISS: {ours / theirs:.3f}")
    calculator = AccuracyCalculator(include=("precision_at_1", "mean_average_precision_at_r"), k="max_bin_count")
    tensors = torch.from_numpy(embeddings), torch.from_numpy(labels)
    values, theirs = measured("AccuracyCalculator, P@1 and MAP@R only", lambda: calculator.get_accuracy(*tensors))
    print(values, f"ratio to AccuracyCalculator: {ours / theirs:.3f}", sep="\n")


def clustering(arrays: Arrays, num_classes: int, size: str, limit_seconds: float) -> None:
    """Compare with FAISS's k-means at the same maximum number of iterations, and with scikit-learn's, which has a time limit."""
    embeddings, _ = arrays
    (chosen, nearest), seeding = measured("ours, first clusters", lambda: first_clusters(embeddings, num_classes, seed=0))
    name = f"{NUM_LLOYD_ITERATIONS} iterations at most"
    (_, inertia), iterating = measured(f"ours, {name}", lambda: lloyd(embeddings, chosen, nearest, NUM_LLOYD_ITERATIONS))
    ours = seeding + iterating
    print(f"ours, both: {ours:.2f} s, inertia {inertia:.2f}")
    their_inertia, theirs = measured(f"faiss.Kmeans, {name}", lambda: kmeans_of_faiss(embeddings, num_classes, NUM_LLOYD_ITERATIONS))
    print(f"inertia {their_inertia:.2f}; ratio of times {ours / theirs:.3f}, of inertias {inertia / their_inertia:.4f}", flush=True)
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    process = get_context("spawn").Process(target=_cluster_with_scikit_learn, args=(size, sender), daemon=True)
    process.start()
    receiver.recv()  # it has generated its data
    if not receiver.poll(limit_seconds):
        process.terminate()
        print(f"scikit-learn KMeans, one initialisation: stopped after {limit_seconds:.0f} s; ratio of times < {ours / limit_seconds:.3f}")
        return
    theirs, their_inertia, num_iterations = receiver.recv()
    process.join()
    print(f"scikit-learn KMeans, one initialisation: {theirs:.2f} s, inertia {their_inertia:.2f} after {num_iterations} iterations")
    print(f"ratio of times: {ours / theirs:.3f}, of inertias: {inertia / their_inertia:.4f}")


def kmeans_of_faiss(embeddings: NDArray[np.float32], num_clusters: int, num_iterations: int) -> float:
    """Compute centres and then each point's cluster, as our k-means does; return the inertia."""
    size = {"min_points_per_centroid": 1, "max_points_per_centroid": len(embeddings)}
    peer = faiss.Kmeans(embeddings.shape[1], num_clusters, niter=num_iterations, **size)
    peer.train(embeddings)
    return float(peer.index.search(embeddings, 1)[0].sum(dtype=np.float64))


def _cluster_with_scikit_learn(size: str, sender: Any) -> None:
    """Run in a separate process, which can be stopped."""
    embeddings, _ = gaussian_classes(*SIZES[size], num_dimensions=512)
    peer = KMeans(SIZES[size][1], n_init=1, max_iter=NUM_LLOYD_ITERATIONS, tol=0, random_state=0)
    sender.send("ready")
    start = time.perf_counter()
    peer.fit(embeddings)
    sender.send((time.perf_counter() - start, peer.inertia_, peer.n_iter_))


def million(num_items: int) -> None:
    embeddings, labels = gaussian_classes(num_items + 10_000, num_items // 10, 0.9, num_dimensions=64)
    gallery, queries = (
        EmbeddingShard(lambda: embeddings[10_000:], labels[10_000:]),
        EmbeddingShard(lambda: embeddings[:10_000], labels[:10_000]),
    )
    config = EvaluationConfig(recall_at=(1, 10, 100), clustering=False)
    values, exact = measured("exact", lambda: evaluate_shards([gallery], config, [queries]))
    print({name: round(value, 5) for name, value in values.items()})
    approximation = ApproximateConfig(index="ivf_flat", num_lists=1024, num_probes=64)
    values, fast = measured("IVF", lambda: evaluate_approximately([gallery], config, approximation, [queries]))
    print({name: round(value, 5) for name, value in values.items()}, f"ratio of times: {fast / exact:.3f}", sep="\n")


if __name__ == "__main__":
    main()
