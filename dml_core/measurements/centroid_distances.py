"""Distances between the fixed centroids of the discriminative loss (Do et al., CVPR 2019, Table 3), which determine how tight its bound is.

The centroids are set before training and never move. They do not depend on the run's seed unless the loss's option `centroid_seed` is null.
"""

from pathlib import Path

import torch

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.losses.discriminative import Discriminative
from dml_core.measurements.contract import FinishedRun

METRICS = ("min_centroid_distance", "max_centroid_distance", "mean_centroid_distance", "std_centroid_distance")


def measure(run: FinishedRun, options: Config, folder: Path) -> dict[str, float]:
    """Return minimum, maximum, mean and standard deviation of the distances between two different centroids.

    Raises:
        EvaluationError: the run's loss has no fixed centroids.
    """
    loss = run.system.loss
    if not isinstance(loss, Discriminative):
        raise EvaluationError(f"{run.title}: the loss '{run.training.loss.name}' has no fixed centroids")
    distances = torch.pdist(loss.fixed_centroids().double())
    statistics = (distances.min(), distances.max(), distances.mean(), distances.std(correction=0))
    return dict(zip(METRICS, map(float, statistics), strict=True))
