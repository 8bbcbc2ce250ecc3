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
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score
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
    runs = (_one_run(points_ND, num_clusters, config.num_iterations, seed + number) for number in range(config.num_runs))
    return min(runs, key=lambda run: run[1])


def _one_run(points_ND: NDArray[np.float32], num_clusters: int, num_iterations: int, seed: int) -> tuple[NDArray[np.int64], float]:
    clusterer = faiss.Kmeans(
        points_ND.shape[1],
        num_clusters,
        niter=num_iterations,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(points_ND),
    )
    clusterer.train(points_ND, init_centroids=points_ND[first_centres(points_ND, num_clusters, seed)])
    distances_N1, clusters_N1 = clusterer.index.search(points_ND, 1)
    return clusters_N1[:, 0], float(distances_N1.sum(dtype=np.float64))


def clustering_metrics(codes_N: NDArray[np.int64], clusters_N: NDArray[np.int64]) -> dict[str, float]:
    """NMI (two averages), AMI and pairwise F1 of a clustering."""
    return {
        "nmi": float(normalized_mutual_info_score(codes_N, clusters_N)),
        "nmi_geometric": float(normalized_mutual_info_score(codes_N, clusters_N, average_method="geometric")),
        "ami": float(adjusted_mutual_info_score(codes_N, clusters_N)),
        "f1": pairwise_f1(codes_N, clusters_N),
    }


def pairwise_f1(codes_N: NDArray[Any], clusters_N: NDArray[Any]) -> float:
    """F1 over pairs of samples; 1 where neither labels nor clusters put any two samples together."""
    (_, false_positives), (false_negatives, true_positives) = pair_confusion_matrix(codes_N, clusters_N).tolist()
    wrong = false_positives + false_negatives
    return 2 * true_positives / (2 * true_positives + wrong) if true_positives + wrong else 1.0
