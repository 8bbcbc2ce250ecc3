"""Bar charts of counts."""

from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from dml_core.figures.canvas import COLOURS, plain_text, single_axes, write_png


def plot_counts(counts_N: NDArray[np.int64], largest: int, path: Path, title: str, counted: str, things: str) -> None:
    """Draw a bar for each count from 1 to `largest`, so that charts of several systems are comparable.

    The N `things`, which the y label names, have a number of `counted` each, of 1 or more.
    """
    figure, axes = single_axes(f"{plain_text(title)}\nmean {counts_N.mean():.1f} of {largest}", counted, things)
    axes.title.set_fontsize(10)
    axes.bar(range(1, largest + 1), np.bincount(counts_N, minlength=largest + 1)[1:], color=COLOURS[0], width=0.85)
    axes.set_xlim(0.4, largest + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    write_png(figure, path)
