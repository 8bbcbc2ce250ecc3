"""Training curves: one panel each for the loss, its parts and each validation metric, over epochs.

Panels are separate because a loss and its parts may differ by orders of magnitude. Each step's value is drawn faintly, the moving average
boldly; the figure states its width in steps.

Shapes: S steps.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike, NDArray

from dml_core.figures.canvas import COLOURS, NEUTRAL, panel_grid, plain_text, style_axes, write_png

MAX_COLUMNS = 3
SMOOTHED_SHARE = 20  # the moving average spans one in so many steps of the run

Series = Mapping[str, tuple[ArrayLike, ArrayLike]]


def plot_training_curves(training: Series, path: Path, title: str, validation: Series | None = None) -> Path:
    """Draw one panel for each named (epochs, values); return `path`.

    Args:
        training: per step: (S,) epochs done, with fractions, and (S,) values; the loss first, of one series or more.
        validation: the same at each epoch's end, drawn as points.
    """
    panels = [(name, *series, False) for name, series in training.items()]
    panels += [(name, *series, True) for name, series in (validation or {}).items()]
    figure, all_axes, _ = panel_grid(len(panels), MAX_COLUMNS, (3.3, 2.5), (1.0, 0.75))
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(panels))]
    windows = [_draw_panel(axes, *panel, colour) for axes, panel, colour in zip(all_axes, panels, colours, strict=True)]
    figure.suptitle(plain_text(title), fontsize=11)
    window = max(windows)
    smoothing = f"; line: mean of the {window} steps around each, faint: every step" if window > 1 else ""
    figure.supxlabel(f"epochs{smoothing}", fontsize=8, color=NEUTRAL)
    return write_png(figure, path)


def smoothed(values: ArrayLike, window: int) -> NDArray[np.float64]:
    """Return (S,) the mean of the `window` (odd) values around each; at the ends over the existing ones."""
    values_S = np.asarray(values, dtype=np.float64)
    sums = np.concatenate([[0.0], np.cumsum(values_S)])
    first_S = np.maximum(np.arange(len(values_S)) - window // 2, 0)
    end_S = np.minimum(np.arange(len(values_S)) + window // 2 + 1, len(values_S))
    return (sums[end_S] - sums[first_S]) / (end_S - first_S)


def _draw_panel(axes: Axes, name: str, x: ArrayLike, y: ArrayLike, are_points: bool, colour: str) -> int:
    """Draw one series; return the width of the smoothing window."""
    x_S, y_S = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    window = 1 if are_points else max(1, len(y_S) // SMOOTHED_SHARE // 2 * 2 + 1)
    if window > 1:
        axes.plot(x_S, y_S, color=colour, alpha=0.3, linewidth=0.7)
    few = {"marker": "o", "markersize": 4} if are_points or len(x_S) < SMOOTHED_SHARE else {}
    axes.plot(x_S, smoothed(y_S, window), color=colour, linewidth=1.8, **few)  # type: ignore[arg-type]
    axes.set_title(plain_text(name), fontsize=9)
    axes.tick_params(labelsize=8)
    style_axes(axes)
    return window
