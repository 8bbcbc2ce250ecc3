"""Bar charts of counts."""

from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from dml_core.errors import EvaluationError
from dml_core.figures.canvas import COLOURS, plain_text, single_axes, write_png


def plot_counts(counts: ArrayLike, largest: int, path: Path, title: str, counted: str, things: str) -> Path:
    """Draw a bar for each count from 1 to `largest`, so that charts of several systems are comparable; return `path`.

    The N `things`, which the y label names, have a number of `counted` each, of 1 or more.

    Raises:
        EvaluationError: there are no counts, or a count has no bar.
    """
    counts_N = np.asarray(counts)
    if len(counts_N) == 0 or counts_N.min() < 1 or counts_N.max() > largest:
        raise EvaluationError(f"a chart of counts needs one or more of 1 to {largest}, found {counts_N.tolist()[:10]}")
    figure, axes = single_axes(f"{plain_text(title)}\nmean {counts_N.mean():.1f} of {largest}", counted, things)
    axes.title.set_fontsize(10)
    axes.bar(range(1, largest + 1), np.bincount(counts_N, minlength=largest + 1)[1:], color=COLOURS[0], width=0.85)
    axes.set_xlim(0.4, largest + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return write_png(figure, path)
