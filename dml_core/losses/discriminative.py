"""Discriminative loss (Do et al., "A Theoretically Sound Upper Bound on the Triplet Loss", CVPR 2019, eq. 6-8): fixed class centroids.

The head returns the unit-length output of the paper's last layer (kind `two_layer`). Shapes: N samples, D dimensions, C classes.
"""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Generator, Tensor

from dml_core.errors import ConfigError
from dml_core.losses.contract import Loss, LossConfig, LossOutput

POINTS_PER_CENTROID = 100  # "a large set of points" in the paper; assumed: of 3 to 100 tried, 100 was closest to Table 3's distances
MAX_KMEANS_CLASSES = 1_000  # the points' memory grows with the square of the classes; 0.8 GB here, and as much again for k-means


class DiscriminativeConfig(LossConfig):
    """Options.

    Attributes:
        centroids: "one_hot" (published; all distances sqrt 2) or "kmeans" (Table 3).
        centroid_seed: seed, below 2^32, of the K-means centroids; None derives one from the run's seed.
    """

    centroids: Literal["one_hot", "kmeans"] = "one_hot"
    centroid_seed: int | None = Field(default=0, ge=0, lt=2**32)


class Discriminative(Loss):
    """||x - c_y|| - sum_{m != y} ||x - c_m|| / (3 (C - 1)), eq. 8 without its constant G, which only scales the learning rate.

    Raises:
        ConfigError: the last layer's size differs from the number of classes, or "kmeans" has more than 1,000 classes.
    """

    Config = DiscriminativeConfig
    config: DiscriminativeConfig

    def __init__(self, config: DiscriminativeConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        if embedding_dim != num_classes:
            raise ConfigError(
                f"loss 'discriminative': its centroids have one dimension per class ({num_classes}), "
                f"the head's output has {embedding_dim}: use head kind 'two_layer'"
            )
        if config.centroids == "kmeans":
            if num_classes > MAX_KMEANS_CLASSES:
                raise ConfigError(
                    f"loss 'discriminative': centroids kmeans takes at most {MAX_KMEANS_CLASSES:,} classes, the training set has "
                    f"{num_classes:,}: its points alone would take {8 * POINTS_PER_CENTROID * num_classes**2 / 1e9:.1f} GB; use one_hot"
                )
            seed = int(torch.randint(2**31, ())) if config.centroid_seed is None else config.centroid_seed  # torch's seed is the run's here
            self.register_buffer("centroids_CD", kmeans_centroids(num_classes, embedding_dim, seed))

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the batch mean of eq. 8."""
        if self.config.centroids == "one_hot":  # avoids a C x C identity matrix: the dot products with its rows are x itself
            total = bound_terms(embeddings_ND, embeddings_ND, labels_N).mean()
        else:
            centroids_CD = self.get_buffer("centroids_CD").to(embeddings_ND.dtype)
            total = bound_terms(embeddings_ND, embeddings_ND @ centroids_CD.T, labels_N, centroids_CD.square().sum(dim=1)).mean()
        return LossOutput(total, {"discriminative": total.detach()})

    def fixed_centroids(self) -> Tensor:
        """Return the centroids, (C, D), whose distances Table 3 reports."""
        return torch.eye(self.num_classes) if self.config.centroids == "one_hot" else self.get_buffer("centroids_CD")


def kmeans_centroids(num_centroids: int, dim: int, seed: int) -> Tensor:
    """Return unit-length K-means centres of uniform points on the hypersphere (section 3.2): float32 (C, D), deterministic for a seed."""
    from sklearn.cluster import KMeans  # takes two seconds, not needed to parse a loss's options

    points = np.random.default_rng(seed).standard_normal((POINTS_PER_CENTROID * num_centroids, dim))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    centres = KMeans(num_centroids, n_init=1, random_state=seed).fit(points).cluster_centers_
    return torch.from_numpy(centres / np.linalg.norm(centres, axis=1, keepdims=True)).float()


def bound_terms(embeddings_ND: Tensor, dot_NC: Tensor, labels_N: Tensor, squared_norm_C: Tensor | float = 1.0) -> Tensor:
    """Return the summand of eq. 8 for each sample, (N,), from its dot products with the centroids and their squared norms."""
    squared_NC = torch.add(embeddings_ND.square().sum(dim=1, keepdim=True) + squared_norm_C, dot_NC, alpha=-2.0)
    # A distance below the rounding error of the subtraction is unknown; its gradient is set to zero instead of infinity.
    distance_NC = squared_NC.clamp_min(torch.finfo(squared_NC.dtype).eps).sqrt()
    own_N = distance_NC.gather(1, labels_N[:, None]).squeeze(1)
    return own_N - (distance_NC.sum(dim=1) - own_N) / (3 * (dot_NC.shape[1] - 1))
