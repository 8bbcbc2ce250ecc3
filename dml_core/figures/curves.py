"""Curves: losses and metrics over training, Recall@K over K."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import ArrayLike

from dml_core.figures.canvas import COLOURS, single_axes, write_png

MAX_MARKED_POINTS = 30


def plot_curves(series: Mapping[str, tuple[ArrayLike, ArrayLike]], path: Path, title: str, x_label: str, y_label: str) -> Path:
    """One line for each named (x, y); returns `path`."""
    figure, axes = single_axes(title, x_label, y_label)
    _draw(figure, axes, series)
    return write_png(figure, path)


def plot_recall_curves(recalls: Mapping[str, Mapping[int, float]], path: Path, title: str = "Recall@K") -> Path:
    """Recall@K of each named system over K, K on a logarithmic axis; returns `path`.

    Args:
        recalls: for each system, Recall@K (a fraction) by K.
        path: the PNG.
        title: above the plot.
    """
    figure, axes = single_axes(title, "K", "Recall@K")
    _draw(figure, axes, {name: (list(by_k), list(by_k.values())) for name, by_k in recalls.items()})
    ks = sorted({k for by_k in recalls.values() for k in by_k})
    axes.set_xscale("log")
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return write_png(figure, path)


def _draw(figure: Figure, axes: Axes, series: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> None:
    styles = ("-", "--", ":")
    for number, (name, (x, y)) in enumerate(series.items()):
        (line,) = axes.plot(x, y, label=name, color=COLOURS[number % len(COLOURS)], linestyle=styles[number // len(COLOURS) % 3])
        if len(line.get_xdata(orig=True)) <= MAX_MARKED_POINTS:  # type: ignore[arg-type]
            line.set(marker="o", markersize=4)
    if series:
        figure.legend(frameon=False, fontsize="small", loc="outside right upper")  # beside the lines, never over them
