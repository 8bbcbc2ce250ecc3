"""Common style of all figures. Uses only matplotlib's object interface, so several threads can make figures at once."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from dml_core.files import writing

# Okabe and Ito's colours, distinguishable with any kind of colour vision, black last.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933", "#000000")
RIGHT, WRONG, NEUTRAL = "#009E73", "#D62728", "#444444"
DOTS_PER_INCH = 150
COMPRESSION = 3  # of 9: takes a third less time than the default 6, for files a tenth larger


def new_figure(width_inches: float = 6.4, height_inches: float = 4.2, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """Return an empty figure that draws to memory and needs no screen; without a layout, axes stay where they are placed."""
    figure = Figure(figsize=(width_inches, height_inches), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def single_axes(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Return a figure with one plain set of axes: light grid, no box."""
    figure = new_figure()
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.set_axisbelow(True)
    style_axes(axes)
    return figure, axes


def panel_grid(
    num_panels: int, max_columns: int, panel_inches: tuple[float, float], margin_inches: tuple[float, float], share_axes: bool = False
) -> tuple[Figure, list[Axes], int]:
    """Return a figure with panels in rows, their axes, and the number of columns.

    The figure is at least 5.6 inches wide, for its title.
    """
    num_columns = min(num_panels, max_columns)
    num_rows = -(-num_panels // num_columns)
    figure = new_figure(max(panel_inches[0] * num_columns + margin_inches[0], 5.6), panel_inches[1] * num_rows + margin_inches[1])
    all_axes = figure.subplots(num_rows, num_columns, squeeze=False, sharex=share_axes, sharey=share_axes).ravel()
    for axes in all_axes[num_panels:]:
        axes.remove()
    return figure, list(all_axes[:num_panels]), num_columns


def style_axes(axes: Axes) -> None:
    """Draw a light grid and no box."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def class_colour(code: int, num_classes: int) -> Any:
    """Return distinguishable colours for few classes, else the circle of hues."""
    if num_classes <= len(COLOURS):
        return COLOURS[code]
    return colormaps["tab10"](code) if num_classes <= 10 else colormaps["hsv"](code / num_classes)


def plain_text(text: str) -> str:
    """Escape a name for matplotlib: `$` would begin a formula."""
    return text.replace("$", r"\$")


def write_png(figure: Figure | Image.Image, path: Path) -> Path:
    """Write the figure atomically, without a date, so that the same arrays give the same bytes; return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = figure if isinstance(figure, Image.Image) else _drawn(figure)
    with writing(path) as file:
        image.save(file, format="png", compress_level=COMPRESSION, dpi=(DOTS_PER_INCH, DOTS_PER_INCH))
    return path


def _drawn(figure: Figure) -> Image.Image:
    """Return the figure's pixels, drawn once; matplotlib's `savefig` draws twice."""
    figure.set_dpi(DOTS_PER_INCH)
    canvas: Any = figure.canvas
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba()))
