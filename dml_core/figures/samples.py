"""Curves of single images, with each image next to its curve. Shapes: S samples, A points of a curve."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dml_core.figures.canvas import COLOURS, NEUTRAL, new_figure, plain_text, style_axes, write_png


def plot_sample_curves(
    images: Sequence[NDArray[np.uint8]],
    captions: Sequence[str],
    x_SA: NDArray[np.float64],
    y_SA: NDArray[np.float64],
    axes_settings: Mapping[str, Any],
    path: Path,
    title: str,
    if_none: str,
    marked_S: NDArray[np.float64] | None = None,
) -> Path:
    """Draw the curves on one set of axes, with the images in a column on the right, framed in their curves' colours; return `path`.

    Args:
        images: S images, up to eight, each (H, W, 3).
        captions: texts above the images.
        x_SA, y_SA: a curve of A points for each image.
        axes_settings: matplotlib's scales and labels.
        if_none: text shown if there is no curve.
        marked_S: x position of a dot on each curve.
    """
    figure = new_figure(7.4, 4.2)
    grid = figure.add_gridspec(max(len(images), 1), 2, width_ratios=(4.2, 1))
    axes = figure.add_subplot(grid[:, 0])
    axes.set(**axes_settings)
    style_axes(axes)
    for number, (image, caption, x_A, y_A) in enumerate(zip(images, captions, x_SA, y_SA, strict=True)):
        colour = COLOURS[number]
        axes.plot(x_A, y_A, color=colour, linewidth=1.8)
        if marked_S is not None:
            axes.plot(marked_S[number], np.interp(marked_S[number], x_A, y_A), "o", color=colour, markersize=6)
        thumbnail = figure.add_subplot(grid[number, 1])
        thumbnail.imshow(image)
        thumbnail.set(xticks=[], yticks=[])
        thumbnail.spines[:].set(color=colour, linewidth=3)
        thumbnail.set_title(plain_text(caption), fontsize=8)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    if not len(images):
        axes.text(0.5, 0.5, if_none, transform=axes.transAxes, ha="center", color=NEUTRAL)
    figure.suptitle(plain_text(title), fontsize=10)
    return write_png(figure, path)
