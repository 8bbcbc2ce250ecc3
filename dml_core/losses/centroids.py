"""Fixed class centroids on the unit hypersphere (Do et al., "A Theoretically Sound Upper Bound on the Triplet Loss", CVPR 2019, 3.2).

Shapes: C centroids, D dimensions.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

POINTS_PER_CENTROID = 100  # "a large set of points" in the paper; assumed: of 3 to 100 tried, 100 was closest to Table 3's distances


class CentroidDistances(NamedTuple):
    """Distances between all pairs of centroids, as in the paper's Table 3."""

    minimum: float
    maximum: float
    mean: float
    std: float


def kmeans_centroids(num_centroids: int, dim: int, seed: int) -> Tensor:
    """Return unit-length K-means centres of uniform points on the hypersphere: float32 (C, D), deterministic for a seed."""
    from sklearn.cluster import KMeans  # takes two seconds, not needed to parse a loss's options

    points = np.random.default_rng(seed).standard_normal((POINTS_PER_CENTROID * num_centroids, dim))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    centres = KMeans(num_centroids, n_init=1, random_state=seed).fit(points).cluster_centers_
    return torch.from_numpy(centres / np.linalg.norm(centres, axis=1, keepdims=True)).float()


def centroid_distances(centroids_CD: Tensor) -> CentroidDistances:
    """Return statistics of the distances between different centroids."""
    distances = torch.pdist(centroids_CD.double())
    return CentroidDistances(*(float(value) for value in (distances.min(), distances.max(), distances.mean(), distances.std(correction=0))))
