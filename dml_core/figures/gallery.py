"""Retrieval galleries as in the papers' figures: a query on the left, its nearest neighbours after it, nearest first.

Below each image stand its class and, for a neighbour, its similarity with a tick or a cross; wrong ones have a thick broken frame too, so
that nothing hangs on telling red from green. Everything is drawn into one set of axes whose units are pixels: an axes for each image took
ten times as long.

Shapes: Q queries, k neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dml_core.errors import EvaluationError
from dml_core.figures.canvas import DOTS_PER_INCH, NEUTRAL, RIGHT, WRONG, new_figure, write_png

# In pixels: an image's side, between columns, three lines of caption, around everything, after the query's column, a line of the head.
TILE, GAP, CAPTION, MARGIN, QUERY_GAP, HEAD_LINE = 144, 14, 58, 14, 24, 27
MIN_WIDTH = 1000  # room for the head's lines where there are few neighbours
CAPTION_SIZE, HEAD_SIZE, TITLE_SIZE = 6.5, 7.5, 10.0  # points
MAX_CHARACTERS = 18  # of a caption's line, which is as wide as an image
MARKS = "✓ same class as the query   ✗ another class, broken frame   numbers: similarity to the query"


@dataclass(frozen=True)
class Neighbour:
    """One retrieved image, with what stands below it."""

    image: Image.Image
    class_name: str
    similarity: float
    is_right: bool


@dataclass(frozen=True)
class GalleryRow:
    """A query and its neighbours, nearest first."""

    image: Image.Image
    class_name: str
    neighbours: Sequence[Neighbour]


def plot_retrieval_gallery(rows: Sequence[GalleryRow], path: Path, title: str = "", note: str = "") -> Path:
    """One line of images for each query; rows may have fewer neighbours than others. Returns `path`.

    Args:
        rows: the queries.
        path: the PNG.
        title: which run this is.
        note: how the queries were chosen; may have several lines.

    Raises:
        EvaluationError: no query.
    """
    if not rows:
        raise EvaluationError("a gallery needs one query or more")
    num_neighbours = max(len(row.neighbours) for row in rows)
    lines = [title, *note.splitlines(), MARKS]
    head = MARGIN + HEAD_LINE * (len(lines) + 1)
    width = max(_left(num_neighbours) + TILE + MARGIN, MIN_WIDTH)
    height = head + len(rows) * (TILE + CAPTION) + MARGIN
    figure = new_figure(width / DOTS_PER_INCH, height / DOTS_PER_INCH, layout=None)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    pixels_HWC = np.full((height, width, 3), 255, dtype=np.uint8)
    _draw_head(axes, lines, num_neighbours)
    for number, row in enumerate(rows):
        top = head + number * (TILE + CAPTION)
        _draw_tile(axes, pixels_HWC, _left(0), top, row.image, NEUTRAL, two_lines(row.class_name))
        for column, neighbour in enumerate(row.neighbours, start=1):
            colour, mark = (RIGHT, "✓") if neighbour.is_right else (WRONG, "✗")
            caption = f"{mark} {neighbour.similarity:.2f}\n{two_lines(neighbour.class_name)}"
            _draw_tile(axes, pixels_HWC, _left(column), top, neighbour.image, colour, caption, is_wrong=not neighbour.is_right)
    axes.add_artist(_Pixels(pixels_HWC))
    return write_png(figure, path)


class _Pixels(Artist):
    """The whole figure's pixels as they are, behind all else: `imshow` resamples them, which took half of a gallery's time."""

    def __init__(self, pixels_HWC: NDArray[np.uint8]) -> None:
        super().__init__()
        self.set_zorder(1)
        opaque_HW1 = np.full((*pixels_HWC.shape[:2], 1), 255, dtype=np.uint8)
        self._upwards_HWC = np.concatenate([pixels_HWC, opaque_HW1], axis=2)[::-1]  # the renderer's lines begin at the bottom

    def draw(self, renderer: RendererBase) -> None:
        """Put them there."""
        renderer.draw_image(renderer.new_gc(), 0, 0, self._upwards_HWC)


def two_lines(name: str, width: int = MAX_CHARACTERS) -> str:
    """A name on at most two lines of `width` characters, broken after a separator where one is near; of a longer one the beginning and
    the end, by which names in a list are told apart."""
    if len(name) <= width:
        return name
    if len(name) > 2 * width:
        return f"{name[: width - 1]}…\n…{name[1 - width :]}"
    breaks = [place for place in range(len(name) - width, width + 1) if name[place - 1] in " _-./"]
    place = max(breaks, default=width)
    return f"{name[:place].rstrip()}\n{name[place:]}"


def _left(column: int) -> int:
    """Where a column's images begin; column 0 is the query."""
    return MARGIN + column * (TILE + GAP) + (QUERY_GAP if column else 0)


def _draw_head(axes: Axes, lines: Sequence[str], num_neighbours: int) -> None:
    """The title in bold, the notes, and a name over each column."""
    for number, line in enumerate(lines):
        size, weight = (HEAD_SIZE, "normal") if number else (TITLE_SIZE, "bold")
        _write(axes, MARGIN, MARGIN + number * HEAD_LINE, line, size, NEUTRAL if number else "black", weight=weight)
    for column in range(num_neighbours + 1):
        name = ("query", "1 (nearest)")[column] if column < 2 else str(column)
        _write(axes, _left(column), MARGIN + len(lines) * HEAD_LINE + 16, name, HEAD_SIZE, "black", va="baseline")


def _draw_tile(
    axes: Axes, pixels_HWC: NDArray[np.uint8], left: int, top: int, image: Image.Image, colour: str, caption: str, is_wrong: bool = False
) -> None:
    """An image into the pixels, which are shown all at once; its frame and caption over them."""
    pixels_HWC[top : top + TILE, left : left + TILE] = _square(image)
    line: dict[str, Any] = {"linewidth": 2.6, "linestyle": (0, (3, 1.2))} if is_wrong else {"linewidth": 1.6}
    axes.add_artist(Rectangle((left, top), TILE, TILE, fill=False, edgecolor=colour, zorder=2, **line))  # limits stay: faster than a patch
    _write(axes, left, top + TILE + 6, caption, CAPTION_SIZE, "black" if colour == NEUTRAL else colour)


def _write(axes: Axes, x: float, y: float, text: str, size: float, colour: str, **more: str) -> None:
    style: dict[str, Any] = {"va": "top", "linespacing": 1.05, "parse_math": False} | more
    axes.text(x, y, text, fontsize=size, color=colour, **style)


def _square(image: Image.Image) -> NDArray[np.uint8]:
    """The image in a white square of TILE pixels: a small one enlarged by a whole number, so that its pixels stay pixels."""
    rgb = image.convert("RGB")
    factor = TILE // max(rgb.size)
    if factor >= 2:
        rgb = rgb.resize((rgb.width * factor, rgb.height * factor), Image.Resampling.NEAREST)
    else:
        rgb = ImageOps.contain(rgb, (TILE, TILE), Image.Resampling.LANCZOS)
    canvas = Image.new("RGB", (TILE, TILE), "white")
    canvas.paste(rgb, ((TILE - rgb.width) // 2, (TILE - rgb.height) // 2))
    return np.asarray(canvas)
