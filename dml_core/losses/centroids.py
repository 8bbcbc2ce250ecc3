"""Fixed class centroids on the unit hypersphere (Do et al., "A Theoretically Sound Upper Bound on the Triplet Loss", CVPR 2019, 3.2).

Shapes: C centroids, D dimensions.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

POINTS_PER_CENTROID = 100  # "a large set of points" in the paper; assumed: of 3 to 100 tried, this came nearest to Table 3's distances


class CentroidDistances(NamedTuple):
    """Distances between all pairs of centroids, as in the paper's Table 3."""

    minimum: float
    maximum: float
    mean: float
    std: float


def kmeans_centroids(num_centroids: int, dim: int, seed: int) -> Tensor:
    """Unit-length centres of a K-means over points drawn uniformly on the hypersphere: float32 (C, D), the same for the same seed."""
    from sklearn.cluster import KMeans  # two seconds that reading the options of a loss does not need

    points = np.random.default_rng(seed).standard_normal((POINTS_PER_CENTROID * num_centroids, dim))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    centres = KMeans(num_centroids, n_init=1, random_state=seed).fit(points).cluster_centers_
    return torch.from_numpy(centres / np.linalg.norm(centres, axis=1, keepdims=True)).float()


def centroid_distances(centroids_CD: Tensor) -> CentroidDistances:
    """Minimum, maximum, mean and standard deviation of the distances between two different centroids."""
    distances = torch.pdist(centroids_CD.double())
    return CentroidDistances(*(float(value) for value in (distances.min(), distances.max(), distances.mean(), distances.std(correction=0))))
