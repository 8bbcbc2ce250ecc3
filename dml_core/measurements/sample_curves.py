"""Figures of single images: one curve per image, with the image next to it.

Shapes: S samples, A points of a curve.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dml_core.config import Config
from dml_core.figures.canvas import COLOURS, NEUTRAL, new_figure, plain_text, style_axes, write_png
from dml_core.measurements.classifier import Floats, Samples
from dml_core.measurements.contract import FinishedRun

NONE_OF_KIND = {"hard": "no image is classified wrongly", "easy": "no image is classified rightly"}
KIND = {"hard": "hard samples, classified wrongly", "easy": "easy samples, classified rightly"}


class Options(Config):
    """Options of a measurement of single images.

    Attributes:
        samples: the figure's panel, "hard" or "easy".
    """

    samples: Samples


def draw_samples(
    run: FinishedRun,
    samples: Samples,
    index_S: NDArray[np.int64],
    margins_S: Floats,
    x_SA: Floats,
    y_SA: Floats,
    scales: dict[str, str],
    path: Path,
    marked_S: Floats | None = None,
) -> None:
    """Draw a curve for each of up to eight images of the run's gallery, with the images in a column on the right.

    An image is framed in its curve's colour; its caption is its class and the margin of its logits.

    Args:
        scales: `xscale`, `yscale` and `xlabel` of the axes.
        marked_S: x position of a dot on each curve.
    """
    figure = new_figure(7.4, 4.2)
    grid = figure.add_gridspec(max(len(index_S), 1), 2, width_ratios=(4.2, 1))
    axes = figure.add_subplot(grid[:, 0])
    axes.set(**scales, ylabel="norm of the gradient")
    style_axes(axes)
    for number, (index, margin, x_A, y_A) in enumerate(zip(index_S, margins_S, x_SA, y_SA, strict=True)):
        colour = COLOURS[number]
        axes.plot(x_A, y_A, color=colour, linewidth=1.8)
        if marked_S is not None:
            axes.plot(marked_S[number], np.interp(marked_S[number], x_A, y_A), "o", color=colour, markersize=6)
        thumbnail = figure.add_subplot(grid[number, 1])
        thumbnail.imshow(run.gallery.image(index))
        thumbnail.set(xticks=[], yticks=[])
        thumbnail.spines[:].set(color=colour, linewidth=3)
        thumbnail.set_title(plain_text(f"{run.gallery.class_name(index)}, margin {margin:.2g}"), fontsize=8)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    if not len(index_S):
        axes.text(0.5, 0.5, NONE_OF_KIND[samples], transform=axes.transAxes, ha="center", color=NEUTRAL)
    figure.suptitle(plain_text(f"{run.title}\n{run.gallery.description}: {KIND[samples]}"), fontsize=10)
    write_png(figure, path)
