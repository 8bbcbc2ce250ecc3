"""Number of different centres of each class (SoftTriple, Figure 3)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.evaluation.separability import num_unique_centres
from dml_core.figures.canvas import COLOURS, plain_text, single_axes, write_png
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
    plot_counts(counts_C, loss.config.num_centres, folder / "unique_centres.png", run.title)
    return {METRICS[0]: float(counts_C.mean())}


def plot_counts(counts_C: NDArray[np.int64], largest: int, path: Path, title: str) -> None:
    """Draw a bar for each count from 1 to `largest`, so that charts of several systems are comparable."""
    from matplotlib.ticker import MaxNLocator  # here, so that a missing one is named by `dml_core.figures`

    figure, axes = single_axes(f"{plain_text(title)}\nmean {counts_C.mean():.1f} of {largest}", "unique centres of a class", "classes")
    axes.title.set_fontsize(10)
    axes.bar(range(1, largest + 1), np.bincount(counts_C, minlength=largest + 1)[1:], color=COLOURS[0], width=0.85)
    axes.set_xlim(0.4, largest + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    write_png(figure, path)
