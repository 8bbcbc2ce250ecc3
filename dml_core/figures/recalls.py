"""Recall@K of several systems with their intervals over seeds: a panel for each K, a row for each system.

Curves of twelve systems over K overlap, and their intervals even more. Here each value has its own position: systems are sorted by their
mean at the first K, so rows have the same order in all panels, and the number next to a value is its rank at that K.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dml_core.errors import EvaluationError
from dml_core.evaluation.statistics.over_seeds import summarise_seeds
from dml_core.evaluation.statistics.paired import MIN_SEEDS
from dml_core.figures.canvas import COLOURS, NEUTRAL, new_figure, plain_text, style_axes, write_png

MAX_PANELS = 6
SAME = 1e-9  # points
ROW_INCHES, PANEL_INCHES, NAME_INCHES = 0.27, 1.75, 1.7

Recalls = Mapping[str, Mapping[int, Sequence[float]]]


def plot_recalls(recalls: Recalls, path: Path, title: str) -> Path:
    """Draw mean, 95 % interval and single seeds of each system at each K; return `path`.

    Args:
        recalls: for each system, by K, Recall@K (a fraction) of each seed. Only the first MAX_PANELS Ks are drawn.

    Raises:
        EvaluationError: there is no system, or systems have different Ks.
    """
    ks = sorted(next(iter(recalls.values()), {}))
    if not ks or any(sorted(by_k) != ks for by_k in recalls.values()):
        raise EvaluationError("a recall figure needs one system or more, all with the same Ks")
    ks = ks[:MAX_PANELS]
    names = sorted(recalls, key=lambda name: -float(np.mean(recalls[name][ks[0]])))
    figure = new_figure(NAME_INCHES + PANEL_INCHES * max(2, len(ks)), 1.15 + ROW_INCHES * len(names))
    panels = figure.subplots(1, len(ks), sharey=True, squeeze=False)[0]
    for axes, k in zip(panels, ks, strict=True):
        _draw_panel(axes, k, [recalls[name][k] for name in names])
    panels[0].set_yticks(range(len(names)), [plain_text(name) for name in names])
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    figure.suptitle(plain_text(title), fontsize=11)
    figure.supxlabel(_legend([len(values) for by_k in recalls.values() for values in by_k.values()]), fontsize=8, color=NEUTRAL)
    return write_png(figure, path)


def _legend(seeds: Sequence[int]) -> str:
    """Return the text below the panels, for the numbers of seeds of all values."""
    enough = [num_seeds for num_seeds in seeds if num_seeds >= MIN_SEEDS]
    interval = "too few seeds for an interval"
    if enough:
        least, most = min(enough), max(enough)
        interval = f"line: its 95 % interval over {most if least == most else f'{least} to {most}'} seeds"
    ticks = ", ticks: the seeds" if max(seeds) > 1 else ""
    return f"per cent; dot: mean, {interval}{ticks}; number: rank of the mean"


def _draw_panel(axes: Axes, k: int, values_of: Sequence[Sequence[float]]) -> None:
    """Draw one K: rows from the top as given, the best mean's row highlighted."""
    summaries = np.array([summarise_seeds(values) for values in values_of], dtype=float)  # no interval is NaN, which is not drawn
    means, half_widths = 100 * summaries.T[:2]
    ranks = 1 + (means[:, None] < means - SAME).sum(axis=1)  # equal means share a rank, also those of the same values in another order
    for row, (values, mean, half_width, rank) in enumerate(zip(values_of, means, half_widths, ranks, strict=True)):
        colour = COLOURS[1] if rank == 1 else COLOURS[0]
        if len(values) > 1:
            axes.plot([max(mean - half_width, 0), min(mean + half_width, 100)], [row, row], color=colour, linewidth=1.6, alpha=0.55)
            axes.plot(100 * np.array(values), [row] * len(values), "|", color=colour, markersize=6, markeredgewidth=0.9)
        axes.plot(mean, row, "o", color=colour, markersize=4.5)
        beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        axes.annotate(str(rank), (1, row), (3, 0), fontsize=7, color=NEUTRAL, **beside)
    axes.set_title(f"Recall@{k}", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(labelsize=8, length=2)
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    style_axes(axes)
