"""Recall@1 of several systems over epochs: a panel for each system, with its training and test images.

A panel shows all other systems' test curves in grey, so that the order of the systems can be read at every epoch. If the curve of the
training images still rises at the end, the system is not trained to convergence.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dml_core.figures.canvas import COLOURS, NEUTRAL, panel_grid, plain_text, style_axes, write_png

MAX_COLUMNS = 4
PANEL_INCHES = (2.3, 1.75)
LEGEND_INCHES = 0.25  # below the figure's top
LINES = {"test": ("test images", COLOURS[0], "-"), "train": ("training images", COLOURS[1], "--")}

Curves = Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]


def plot_over_epochs(curves: Curves, path: Path, title: str) -> Path:
    """Draw means over seeds, with the seeds' range as a band; return `path`.

    Args:
        curves: for each of one or more systems and each role ("train", "test"), by epochs done, Recall@1 (a fraction) of each seed.
    """
    figure, all_axes, num_columns = panel_grid(len(curves), MAX_COLUMNS, PANEL_INCHES, (0.5, 1.1), share_axes=True)
    scores = [score for roles in curves.values() for curve in roles.values() for seeds in curve.values() for score in seeds]
    lowest = 10 * max(0, math.ceil(10 * min(scores)) - 1)
    for axes, (name, roles) in zip(all_axes, curves.items(), strict=True):
        for others in curves.values():
            _draw(axes, others.get("test", {}), color=NEUTRAL, alpha=0.35, linewidth=0.7)
        for role, (label, colour, style) in LINES.items():
            _draw(axes, roles.get(role, {}), band=True, color=colour, linestyle=style, linewidth=1.8, label=label)
        axes.set_title(plain_text(name), fontsize=9)
        axes.set_ylim(lowest, 100)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.tick_params(labelsize=8, length=2)
        style_axes(axes)
    for axes in all_axes[-num_columns:]:
        axes.tick_params(labelbottom=True)
    figure.suptitle(f"{plain_text(title)}\n ", fontsize=11)  # the second line is for the legend
    figure.supxlabel("epochs; line: mean over seeds, band: all seeds, grey: test images of the other systems", fontsize=8, color=NEUTRAL)
    figure.supylabel("Recall@1, per cent", fontsize=8, color=NEUTRAL)
    lines, labels = all_axes[0].get_legend_handles_labels()
    below_title = 1 - LEGEND_INCHES / figure.get_figheight()
    figure.legend(lines, labels, loc="upper center", bbox_to_anchor=(0.5, below_title), ncols=2, fontsize=8, frameon=False, borderpad=0)
    return write_png(figure, path)


def _draw(axes: Axes, curve: Mapping[int, Sequence[float]], band: bool = False, **line: object) -> None:
    epochs = sorted(curve)
    means, lows, highs = ([100 * float(of(curve[epoch])) for epoch in epochs] for of in (np.mean, np.min, np.max))
    axes.plot(epochs, means, **line)  # type: ignore[arg-type]
    if band:
        axes.fill_between(epochs, lows, highs, color=line["color"], alpha=0.2, linewidth=0)
