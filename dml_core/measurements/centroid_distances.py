"""How far the fixed centroids of the discriminative loss lie apart (Do et al., CVPR 2019, Table 3): what makes its bound tight.

They are placed before training and never move, so seeds of the run change nothing here; `centroid_seed` is an option of the loss.
"""

from pathlib import Path

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.losses.centroids import centroid_distances
from dml_core.losses.discriminative import Discriminative
from dml_core.measurements.contract import FinishedRun

METRICS = ("min_centroid_distance", "max_centroid_distance", "mean_centroid_distance", "std_centroid_distance")


class Options(Config):
    """None."""


def measure(run: FinishedRun, options: Options, folder: Path) -> dict[str, float]:
    """Minimum, maximum, mean and standard deviation of the distances between two different centroids.

    Raises:
        EvaluationError: the run's loss has no fixed centroids.
    """
    loss = run.system.loss
    if not isinstance(loss, Discriminative):
        raise EvaluationError(f"{run.title}: the loss '{run.training.loss.name}' has no fixed centroids")
    return dict(zip(METRICS, centroid_distances(loss.fixed_centroids()), strict=True))
