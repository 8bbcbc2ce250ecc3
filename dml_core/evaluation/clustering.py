"""Clustering metrics: k-means, then NMI, AMI and pairwise F1 against the labels.

The number of clusters is that of the classes. NMI is I(labels; clusters) divided by the mean of the two entropies, arithmetic (`nmi`,
today's default) or geometric (`nmi_geometric`, computed by scikit-learn 0.19 for the heated-up softmax paper); AMI corrects it for chance,
with the arithmetic mean (Vinh et al. 2010). F1 is over pairs: precision is the share of same-class pairs among the pairs of one cluster,
and conversely for recall (Manning et al. 2008, section 16.3).

Shapes: N samples, D dimensions, K clusters.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import gammaln
from scipy.stats import entropy
from sklearn.metrics import mutual_info_score, normalized_mutual_info_score
from sklearn.metrics.cluster import pair_confusion_matrix
from torch import Tensor

from dml_core.evaluation.config import KMeansConfig
from dml_core.evaluation.kmeans_init import CPU, first_clusters
from dml_core.evaluation.retrieval.geometry import NUM_ROWS_AT_ONCE, Points, blocks, centred, origin
from dml_core.evaluation.threads import is_large, one_thread
from dml_core.float32 import full_float32

PRODUCTS_ON_GPU = 2**26  # at once: 256 MB
SEED_STEP = 2**32  # between the seeds of one call's runs: above any seed of an experiment
Search = Callable[[NDArray[np.bool_], NDArray[np.float32]], tuple[NDArray[np.float32], NDArray[np.int64]]]  # some points, centres


def kmeans(
    points: Points, num_clusters: int, config: KMeansConfig, seed: int, device: torch.device = CPU
) -> tuple[NDArray[np.int64], float]:
    """Return the cluster of each point, (N,), and the inertia (sum of squared distances to the points' centres).

    Runs Lloyd's iterations from `kmeans_init.first_clusters`; the run with the lowest inertia is used. Deterministic on one machine.
    No run depends on the number of runs, and runs of different seeds do not begin with the same centres. If fewer points than
    `num_clusters` are distinct, each of these is a cluster; Lloyd's iterations would divide equal points, because their mean is rounded.
    """
    points_ND = centred(points, origin(points))
    if (groups_N := _fewer_groups(points_ND, num_clusters)) is not None:
        return groups_N, 0.0
    seeds = (seed + run * SEED_STEP for run in range(config.num_runs))
    runs = (lloyd(points_ND, *first_clusters(points_ND, num_clusters, s, device), config.num_iterations, device) for s in seeds)
    with one_thread(not is_large(points_ND.size * num_clusters)), full_float32():
        return min(runs, key=lambda run: run[1])


def _fewer_groups(points_ND: NDArray[np.float32], num_clusters: int) -> NDArray[np.int64] | None:
    """Return the number of each point among the distinct ones if these are fewer than `num_clusters`, else None."""
    numbers: dict[bytes, int] = {}
    groups = []
    for point_D in points_ND:
        groups.append(numbers.setdefault(point_D.tobytes(), len(numbers)))
        if len(numbers) == num_clusters:
            return None
    return np.array(groups)


def lloyd(
    points_ND: NDArray[np.float32],
    first_K: NDArray[np.int64],
    clusters_N: NDArray[np.int64],
    num_iterations: int,
    device: torch.device = CPU,
) -> tuple[NDArray[np.int64], float]:
    """Return clusters (N,) and inertia after at most `num_iterations`; stops when no point changes its cluster.

    A cluster with unchanged points keeps its centre, so its points are compared only with the centres that moved, which are few after the
    first iterations. An empty cluster gets the point farthest from its own centre.

    Args:
        points_ND: the points to cluster.
        first_K: indices of the points used as first centres.
        clusters_N: initial cluster of each point; no cluster is empty.
        num_iterations: each moves the centres to the means of their points, then points to their nearest centres.
        device: where the nearest centres are searched: by FAISS on the CPU, by torch on a GPU.
    """
    nearest = _search_on_cpu(points_ND) if device == CPU else _search_on_gpu(torch.from_numpy(points_ND).to(device))
    centres_KD, clusters_N = points_ND[first_K], clusters_N.copy()
    distances_N, moved_M = np.zeros(len(points_ND), dtype=np.float32), np.arange(len(first_K))
    for _ in range(num_iterations):
        _move_to_means(centres_KD, moved_M, points_ND, clusters_N)
        before_N = clusters_N.copy()
        is_loose_N = np.isin(before_N, moved_M)
        for some_N, among in ((is_loose_N, np.arange(len(centres_KD))), (~is_loose_N, moved_M)):
            found_N, index_N = nearest(some_N, centres_KD[among])
            is_new = found_N < np.where(is_loose_N[some_N], np.inf, distances_N[some_N])
            distances_N[some_N] = np.where(is_new, found_N, distances_N[some_N])
            clusters_N[some_N] = np.where(is_new, among[index_N], clusters_N[some_N])
        empty = np.setdiff1d(np.arange(len(centres_KD)), clusters_N)
        farthest = np.argsort(-distances_N, kind="stable")[: len(empty)]
        farthest = farthest[distances_N[farthest] > 0]
        centres_KD[empty[: len(farthest)]] = points_ND[farthest]
        clusters_N[farthest], distances_N[farthest] = empty[: len(farthest)], 0
        is_other_N = clusters_N != before_N
        if not is_other_N.any():
            break
        moved_M = np.unique([before_N[is_other_N], clusters_N[is_other_N]])
    squares = (np.square(points_ND[rows] - centres_KD[clusters_N[rows]]) for rows in blocks(len(points_ND), NUM_ROWS_AT_ONCE))
    return clusters_N, float(sum(part.sum(dtype=np.float64) for part in squares))


def _search_on_cpu(points_ND: NDArray[np.float32]) -> Search:
    import faiss  # here, so that a missing one is named by `dml_core.evaluation.retrieval`

    def nearest(is_wanted_N: NDArray[np.bool_], centres_KD: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        distances_N1, index_N1 = faiss.knn(points_ND[is_wanted_N], centres_KD, 1)
        return distances_N1[:, 0], index_N1[:, 0]

    return nearest


def _search_on_gpu(points: Tensor) -> Search:
    """Return a search without FAISS, whose GPU libraries must not share a process with torch's."""

    def nearest(is_wanted_N: NDArray[np.bool_], centres_KD: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        wanted, centres = (torch.from_numpy(part).to(points.device) for part in (np.flatnonzero(is_wanted_N), centres_KD))
        distances_N, index_N = torch.zeros_like(wanted, dtype=torch.float32), torch.zeros_like(wanted)
        for rows in blocks(len(wanted), max(1, PRODUCTS_ON_GPU // len(centres))):
            some_RD = points[wanted[rows]]
            nearness_R, index_N[rows] = torch.addmm(-centres.square().sum(dim=1) / 2, some_RD, centres.T).max(dim=1)
            distances_N[rows] = (some_RD.square().sum(dim=1) - 2 * nearness_R).clamp_(min=0)
        return distances_N.cpu().numpy(), index_N.cpu().numpy()

    return nearest


def _move_to_means(
    centres_KD: NDArray[np.float32], moved_M: NDArray[np.int64], points_ND: NDArray[np.float32], clusters_N: NDArray[np.int64]
) -> None:
    """Move the centres of the moved clusters to the means of their points; a centre without points stays."""
    of_moved = np.flatnonzero(np.isin(clusters_N, moved_M))
    clusters, index, sizes = np.unique(clusters_N[of_moved], return_inverse=True, return_counts=True)
    membership = csr_array((np.ones(len(of_moved), dtype=np.float32), (index, np.arange(len(of_moved)))))
    centres_KD[clusters] = (membership @ points_ND[of_moved]) / sizes[:, None].astype(np.float32)


def clustering_metrics(codes_N: NDArray[np.int64], clusters_N: NDArray[np.int64]) -> dict[str, float]:
    """Return NMI (two averages), AMI and pairwise F1 of a clustering."""
    return {
        "nmi": float(normalized_mutual_info_score(codes_N, clusters_N)),
        "nmi_geometric": float(normalized_mutual_info_score(codes_N, clusters_N, average_method="geometric")),
        "ami": adjusted_mutual_information(codes_N, clusters_N),
        "f1": pairwise_f1(codes_N, clusters_N),
    }


def adjusted_mutual_information(codes_N: NDArray[Any], clusters_N: NDArray[Any]) -> float:
    """Return (MI - E[MI]) / (mean entropy - E[MI]); 1 for a perfect clustering, 0 on average for a random one of the same sizes.

    scikit-learn takes most of a minute for 11,000 classes because it visits every pair of a class and a cluster; the expectation depends
    only on their sizes, few of which differ.
    """
    class_sizes, cluster_sizes = (np.unique(labels, return_counts=True)[1] for labels in (codes_N, clusters_N))
    if len(class_sizes) == len(cluster_sizes) and len(class_sizes) in (1, len(codes_N)):
        return 1.0
    expected = _expected_mutual_information(class_sizes, cluster_sizes)
    mean_entropy = (entropy(class_sizes) + entropy(cluster_sizes)) / 2
    left = max(mean_entropy - expected, np.finfo(np.float64).eps)  # 0 only by rounding: partitions with exactly 0 returned above
    return float((mutual_info_score(codes_N, clusters_N) - expected) / left)


def _expected_mutual_information(class_sizes: NDArray[np.int64], cluster_sizes: NDArray[np.int64]) -> float:
    """Return the expectation over all pairs of partitions with these sizes (Vinh et al. 2010, eq. 24a): overlaps are hypergeometric."""
    total = int(class_sizes.sum())
    log_factorial = gammaln(np.arange(total + 1) + 1.0)
    expected = 0.0
    for a, num_classes in zip(*np.unique(class_sizes, return_counts=True), strict=True):
        for b, num_clusters in zip(*np.unique(cluster_sizes, return_counts=True), strict=True):
            overlap = np.arange(max(1, a + b - total), min(a, b) + 1)
            above = log_factorial[a] + log_factorial[b] + log_factorial[total - a] + log_factorial[total - b] - log_factorial[total]
            below = log_factorial[[overlap, a - overlap, b - overlap, total - a - b + overlap]].sum(axis=0)
            information = overlap / total * np.log(total * overlap / (float(a) * float(b)))
            expected += float(num_classes) * float(num_clusters) * float(information @ np.exp(above - below))
    return expected


def pairwise_f1(codes_N: NDArray[Any], clusters_N: NDArray[Any]) -> float:
    """Return F1 over pairs of samples; 1 if neither labels nor clusters join any two samples."""
    (_, false_positives), (false_negatives, true_positives) = pair_confusion_matrix(codes_N, clusters_N).tolist()
    wrong = false_positives + false_negatives
    return 2 * true_positives / (2 * true_positives + wrong) if true_positives + wrong else 1.0
