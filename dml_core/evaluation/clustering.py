"""Clustering metrics: k-means through FAISS, then NMI, AMI and pairwise F1 against the labels.

As many clusters as classes. NMI is I(labels; clusters) divided by the mean of the two entropies, arithmetic (`nmi`, today's default) or
geometric (`nmi_geometric`, which the heated-up softmax paper's scikit-learn 0.19 computed); AMI corrects it for chance, with the
arithmetic mean (Vinh et al. 2010). F1 is over pairs: of all pairs in one cluster, precision is the share of one class, and conversely
for recall (Manning et al. 2008, section 16.3).

Shapes: N samples, D dimensions, K clusters.
"""

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln
from scipy.stats import entropy
from sklearn.metrics import mutual_info_score, normalized_mutual_info_score
from sklearn.metrics.cluster import pair_confusion_matrix

from dml_core.evaluation.config import KMeansConfig
from dml_core.evaluation.geometry import Points, centred, origin
from dml_core.evaluation.seeding import first_centres


def kmeans(points: Points, num_clusters: int, config: KMeansConfig, seed: int) -> tuple[NDArray[np.int64], float]:
    """Cluster of each point, (N,), and the inertia (sum of squared distances to the own centre).

    FAISS's Lloyd iterations from the centres of `seeding.first_centres`; of several runs the one with the lowest inertia. The same on
    every run of one machine, and run r of a seed is the same however many runs there are.
    """
    points_ND = centred(points, origin(points))
    seeds = range(seed, seed + config.num_runs)
    runs = (lloyd(points_ND, points_ND[first_centres(points_ND, num_clusters, s)], config.num_iterations) for s in seeds)
    return min(runs, key=lambda run: run[1])


def lloyd(points_ND: NDArray[np.float32], centres_KD: NDArray[np.float32], num_iterations: int) -> tuple[NDArray[np.int64], float]:
    """Clusters (N,) and inertia after at most `num_iterations` from these centres; it ends once the inertia stays the same."""
    clusterer = faiss.Kmeans(
        points_ND.shape[1],
        len(centres_KD),
        niter=num_iterations,
        min_points_per_centroid=1,
        max_points_per_centroid=len(points_ND),
    )
    clusterer.train(points_ND, init_centroids=centres_KD)
    distances_N1, clusters_N1 = clusterer.index.search(points_ND, 1)
    return clusters_N1[:, 0], float(distances_N1.sum(dtype=np.float64))


def clustering_metrics(codes_N: NDArray[np.int64], clusters_N: NDArray[np.int64]) -> dict[str, float]:
    """NMI (two averages), AMI and pairwise F1 of a clustering."""
    return {
        "nmi": float(normalized_mutual_info_score(codes_N, clusters_N)),
        "nmi_geometric": float(normalized_mutual_info_score(codes_N, clusters_N, average_method="geometric")),
        "ami": adjusted_mutual_information(codes_N, clusters_N),
        "f1": pairwise_f1(codes_N, clusters_N),
    }


def adjusted_mutual_information(codes_N: NDArray[Any], clusters_N: NDArray[Any]) -> float:
    """(MI - E[MI]) / (mean entropy - E[MI]); 1 for a perfect clustering, 0 on average for a random one of the same sizes.

    scikit-learn's takes the better part of a minute on 11,000 classes because it visits every pair of a class and a cluster; the
    expectation depends on their sizes alone, and of these few differ.
    """
    class_sizes, cluster_sizes = (np.unique(labels, return_counts=True)[1] for labels in (codes_N, clusters_N))
    if len(class_sizes) == len(cluster_sizes) and len(class_sizes) in (1, len(codes_N)):
        return 1.0
    expected = _expected_mutual_information(class_sizes, cluster_sizes)
    mean_entropy = (entropy(class_sizes) + entropy(cluster_sizes)) / 2
    left = max(mean_entropy - expected, np.finfo(np.float64).eps)  # only rounding could leave nothing: the partitions that do are above
    return float((mutual_info_score(codes_N, clusters_N) - expected) / left)


def _expected_mutual_information(class_sizes: NDArray[np.int64], cluster_sizes: NDArray[np.int64]) -> float:
    """Of all pairs of partitions with these sizes (Vinh et al. 2010, eq. 24a): overlaps are hypergeometric."""
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
    """F1 over pairs of samples; 1 where neither labels nor clusters put any two samples together."""
    (_, false_positives), (false_negatives, true_positives) = pair_confusion_matrix(codes_N, clusters_N).tolist()
    wrong = false_positives + false_negatives
    return 2 * true_positives / (2 * true_positives + wrong) if true_positives + wrong else 1.0
