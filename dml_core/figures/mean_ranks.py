"""Critical-difference diagram (Demsar, JMLR 2006): systems on an axis of mean ranks; bars join those without significant differences."""

from pathlib import Path

from matplotlib.axes import Axes

from dml_core.evaluation.statistics.mean_ranks import Ranking
from dml_core.figures.canvas import COLOURS, NEUTRAL, new_figure, plain_text, write_png

LETTER_INCHES, AXIS_INCHES, ROW_INCHES, BAR_INCHES, HEAD_INCHES = 0.068, 4.6, 0.24, 0.13, 0.85
LONGEST_NAME = 60  # characters; longer names are cut at the end


def plot_mean_ranks(ranking: Ranking, path: Path) -> Path:
    """Draw the ranking, the best on the left; return `path`.

    The better half of the systems has its names on the left, the other half on the right. A bar joins systems whose mean ranks are within
    the critical difference, which is drawn above the axis.
    """
    num_systems = len(ranking.mean_ranks)
    num_rows, depth = (num_systems + 1) // 2, BAR_INCHES * (len(ranking.groups) + 1)
    height = HEAD_INCHES + depth + ROW_INCHES * (num_rows + 0.5)
    names = {name: name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..." for name in ranking.mean_ranks}
    beside = 0.6 + LETTER_INCHES * max(8, *map(len, names.values()))
    figure = new_figure(AXIS_INCHES + 2 * beside, height, layout=None)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-beside, AXIS_INCHES + beside), ylim=(HEAD_INCHES - height, HEAD_INCHES))  # in inches, the axis at 0
    axes.axis("off")
    _draw_axis(axes, num_systems)
    _draw_critical_difference(axes, ranking.critical_difference, num_systems)
    for number, group in enumerate(ranking.groups):
        first, last = (_at(ranking.mean_ranks[name], num_systems) for name in (group[0], group[-1]))
        axes.plot([first - 0.05, last + 0.05], [-BAR_INCHES * (number + 1)] * 2, color=COLOURS[1], linewidth=3.2, solid_capstyle="butt")
    for place, (name, rank) in enumerate(ranking.mean_ranks.items()):
        is_left = place < num_rows
        row = place if is_left else num_systems - 1 - place
        outwards, edge = (-1, -0.12) if is_left else (1, AXIS_INCHES + 0.12)
        at, level = _at(rank, num_systems), -depth - ROW_INCHES * (row + 0.5)
        axes.plot([at, at, edge], [0, level, level], color=COLOURS[0], linewidth=0.9)
        label = f"{plain_text(names[name])}  {rank:.2f}" if is_left else f"{rank:.2f}  {plain_text(names[name])}"
        axes.text(edge + 0.06 * outwards, level, label, ha="right" if is_left else "left", va="center", fontsize=8)
    over = ranking.over if ranking.over == "datasets" else "seeds of one dataset"
    says = (
        f"mean rank over {len(ranking.blocks)} {over}, 1 is best; bars: not told apart (Nemenyi, 0.05); Friedman p = {ranking.p_value:.2g}"
    )
    axes.text(AXIS_INCHES / 2, HEAD_INCHES - 0.08, says, ha="center", va="top", fontsize=8, color=NEUTRAL)
    return write_png(figure, path)


def _at(rank: float, num_systems: int) -> float:
    """Return the position of a mean rank in inches."""
    return AXIS_INCHES * (rank - 1) / (num_systems - 1)


def _draw_axis(axes: Axes, num_systems: int) -> None:
    axes.plot([0, AXIS_INCHES], [0, 0], color="black", linewidth=1)
    for rank in range(1, num_systems + 1):
        at = _at(rank, num_systems)
        axes.plot([at, at], [0, 0.06], color="black", linewidth=1)
        axes.text(at, 0.1, str(rank), ha="center", va="bottom", fontsize=8)


def _draw_critical_difference(axes: Axes, critical_difference: float, num_systems: int) -> None:
    """Draw it from the left end, cut to the axis's width; the text states if it is cut."""
    width, level = AXIS_INCHES * critical_difference / (num_systems - 1), 0.4
    shown = min(width, AXIS_INCHES)
    axes.plot([0, shown], [level, level], color=NEUTRAL, linewidth=1.4)
    for end in (0, shown):
        axes.plot([end, end], [level - 0.04, level + 0.04], color=NEUTRAL, linewidth=1.4)
    says = f"critical difference {critical_difference:.2f}"
    if width <= AXIS_INCHES:
        axes.text(shown + 0.08, level, says, ha="left", va="center", fontsize=8, color=NEUTRAL)
    else:
        axes.text(shown / 2, level + 0.04, f"{says}, more than the axis", ha="center", va="bottom", fontsize=8, color=NEUTRAL)
