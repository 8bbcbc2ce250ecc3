"""Curves of single images, with each image next to its curve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dml_core.figures.canvas import COLOURS, NEUTRAL, new_figure, plain_text, write_png


@dataclass(frozen=True)
class SampleCurve:
    """One image and its curve.

    Attributes:
        image: (H, W, 3), uint8.
        label: text next to the image.
        x, y: (A,) the curve.
        marked: x position of a dot.
    """

    image: NDArray[np.uint8]
    label: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    marked: float | None = None


def plot_sample_curves(curves: Sequence[SampleCurve], axes_settings: Mapping[str, Any], path: Path, title: str, if_none: str) -> Path:
    """Draw the curves on one set of axes, with the images in a column on the right, framed in their curves' colours; return `path`.

    Args:
        curves: up to eight.
        axes_settings: matplotlib's scales and labels.
        path: the PNG.
        title: title of the figure.
        if_none: text shown if there is no curve.
    """
    figure = new_figure(7.4, 4.2)
    grid = figure.add_gridspec(max(len(curves), 1), 2, width_ratios=(4.2, 1))
    axes = figure.add_subplot(grid[:, 0])
    axes.set(**axes_settings)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    for number, curve in enumerate(curves):
        colour = COLOURS[number]
        axes.plot(curve.x, curve.y, color=colour, linewidth=1.8)
        if curve.marked is not None:
            axes.plot(curve.marked, np.interp(curve.marked, curve.x, curve.y), "o", color=colour, markersize=6)
        thumbnail = figure.add_subplot(grid[number, 1])
        thumbnail.imshow(curve.image)
        thumbnail.set(xticks=[], yticks=[])
        thumbnail.spines[:].set(color=colour, linewidth=3)
        thumbnail.set_title(plain_text(curve.label), fontsize=8)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    if not curves:
        axes.text(0.5, 0.5, if_none, transform=axes.transAxes, ha="center", color=NEUTRAL)
    figure.suptitle(plain_text(title), fontsize=10)
    return write_png(figure, path)
