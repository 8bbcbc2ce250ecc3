"""Number of different centres of each class (SoftTriple, Figure 3)."""

from pathlib import Path

import numpy as np

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.evaluation.separability import num_unique_centres
from dml_core.figures.counts import plot_counts
from dml_core.losses.multi_centre import MultiCentre
from dml_core.measurements.contract import FinishedRun

METRICS = ("num_unique_centres",)


class Options(Config):
    """Options of the measurement.

    Attributes:
        max_distance: between unit vectors that count as one centre; assumed, since the paper states none.
    """

    max_distance: float = 0.1


def measure(run: FinishedRun, options: Options, folder: Path) -> dict[str, float]:
    """Return the mean over the training classes; draw the distribution and save each class's count in `unique_centres.npy`, (C,).

    Raises:
        EvaluationError: the run's loss does not have several centres per class.
    """
    loss = run.system.loss
    if not isinstance(loss, MultiCentre):
        raise EvaluationError(f"{run.title}: the loss '{run.training.loss.name}' has no centres to count")
    counts_C = num_unique_centres(loss.centres_CKD.detach().numpy(), options.max_distance)
    np.save(folder / "unique_centres.npy", counts_C)
    plot_counts(counts_C, loss.config.num_centres, folder / "unique_centres.png", run.title, "unique centres of a class", "classes")
    return {METRICS[0]: float(counts_C.mean())}
