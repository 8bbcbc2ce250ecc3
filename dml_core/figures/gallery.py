"""Retrieval galleries as in the papers' figures: a query on the left, then its nearest neighbours, nearest first.

Below each image are its class and, for a neighbour, its similarity with a tick or a cross; wrong ones also have a thick broken frame, so
that nothing depends on distinguishing red from green. Drawn by Pillow with the font of the other figures: matplotlib took five times as
long for pixels and short texts.

Shapes: Q queries, k neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.errors import EvaluationError
from dml_core.evaluation.retrieval.outcomes import QueryOutcomes
from dml_core.figures.canvas import NEUTRAL, RIGHT, WRONG, write_png

# In pixels: side of an image, gap between columns, three caption lines, outer margin, gap after the query's column, line of the head.
TILE, GAP, CAPTION, MARGIN, QUERY_GAP, HEAD_LINE = 144, 14, 58, 14, 24, 27
MIN_WIDTH = 1000  # room for the head's lines if there are few neighbours
CAPTION_SIZE, HEAD_SIZE, TITLE_SIZE = 13.5, 15.5, 21.0
FRAME, BROKEN_FRAME, DASH, BREAK = 3, 5, 16, 6
MAX_CHARACTERS = 18  # per caption line, which is as wide as an image
MARKS = "✓ same class as the query   ✗ another class, broken frame   numbers: similarity to the query"


@dataclass(frozen=True)
class Neighbour:
    """One retrieved image and its caption."""

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


def retrieved_row(queries: EmbeddedImages, gallery: EmbeddedImages, query: int, outcomes: QueryOutcomes, place: int) -> GalleryRow:
    """Return the row of a query and its neighbours, which `outcomes` has at `place`."""
    found_k = zip(outcomes.neighbours[place], outcomes.similarities[place], outcomes.is_right[place], strict=True)
    neighbours = [Neighbour(gallery.image(at), gallery.class_name(at), float(score), bool(is_right)) for at, score, is_right in found_k]
    return GalleryRow(queries.image(query), queries.class_name(query), neighbours)


def plot_retrieval_gallery(rows: Sequence[GalleryRow], path: Path, title: str = "", note: str = "") -> Path:
    """Draw one row of images for each query; rows may have different numbers of neighbours. Return `path`.

    Args:
        title: name of the run.
        note: how the queries were chosen; may have several lines.

    Raises:
        EvaluationError: there is no query.
    """
    if not rows:
        raise EvaluationError("a gallery needs one query or more")
    num_neighbours = max(len(row.neighbours) for row in rows)
    lines = [title, *note.splitlines(), MARKS]
    head = MARGIN + HEAD_LINE * (len(lines) + 1)
    width = max(_left(num_neighbours) + TILE + MARGIN, MIN_WIDTH)
    height = head + len(rows) * (TILE + CAPTION) + MARGIN
    canvas = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(canvas)
    _draw_head(draw, lines, num_neighbours)
    for number, row in enumerate(rows):
        top = head + number * (TILE + CAPTION)
        _draw_tile(canvas, draw, _left(0), top, row.image, NEUTRAL, two_lines(row.class_name))
        for column, neighbour in enumerate(row.neighbours, start=1):
            colour, mark = (RIGHT, "✓") if neighbour.is_right else (WRONG, "✗")
            caption = f"{mark} {neighbour.similarity:.2f}\n{two_lines(neighbour.class_name)}"
            _draw_tile(canvas, draw, _left(column), top, neighbour.image, colour, caption, is_wrong=not neighbour.is_right)
    return write_png(canvas, path)


def two_lines(name: str) -> str:
    """Return a name on at most two lines of MAX_CHARACTERS, broken after a separator if possible; longer ones keep only their two ends."""
    if len(name) <= MAX_CHARACTERS:
        return name
    if len(name) > 2 * MAX_CHARACTERS:
        return f"{name[: MAX_CHARACTERS - 1]}…\n…{name[1 - MAX_CHARACTERS :]}"
    breaks = [place for place in range(len(name) - MAX_CHARACTERS, MAX_CHARACTERS + 1) if name[place - 1] in " _-./"]
    place = max(breaks, default=MAX_CHARACTERS)
    return f"{name[:place].rstrip()}\n{name[place:]}"


def _left(column: int) -> int:
    """Return the left edge of a column's images; column 0 is the query."""
    return MARGIN + column * (TILE + GAP) + (QUERY_GAP if column else 0)


def _draw_head(draw: ImageDraw.ImageDraw, lines: Sequence[str], num_neighbours: int) -> None:
    """Draw the title in bold, the notes, and a name above each column."""
    for number, line in enumerate(lines):
        size, colour = (HEAD_SIZE, NEUTRAL) if number else (TITLE_SIZE, "black")
        draw.text((MARGIN, MARGIN + number * HEAD_LINE), line, colour, _font(size, is_bold=not number))
    for column in range(num_neighbours + 1):
        name = ("query", "1 (nearest)")[column] if column < 2 else str(column)
        draw.text((_left(column), MARGIN + len(lines) * HEAD_LINE + 16), name, "black", _font(HEAD_SIZE), anchor="ls")


def _draw_tile(
    canvas: Image.Image,
    draw: ImageDraw.ImageDraw,
    left: int,
    top: int,
    image: Image.Image,
    colour: str,
    caption: str,
    is_wrong: bool = False,
) -> None:
    """Draw an image in its frame, and its caption."""
    canvas.paste(_square(image), (left, top))
    width = BROKEN_FRAME if is_wrong else FRAME
    low, high = -(width // 2), TILE + width // 2
    for start in range(low, high, DASH + BREAK) if is_wrong else (low,):
        end = min(start + DASH, high) if is_wrong else high
        for edge in (low, high - width + 1):  # top and bottom, left and right
            draw.rectangle((left + start, top + edge, left + end, top + edge + width - 1), colour)
            draw.rectangle((left + edge, top + start, left + edge + width - 1, top + end), colour)
    draw.multiline_text((left, top + TILE + 6), caption, "black" if colour == NEUTRAL else colour, _font(CAPTION_SIZE), spacing=2)


@cache
def _font(size: float, is_bold: bool = False) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if is_bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf" / name, size, layout_engine=ImageFont.Layout.BASIC)


def scaled(image: Image.Image, edge: int) -> Image.Image:
    """Return the image with a longer side of `edge`; a long strip is at least a pixel wide, unlike Pillow's own `contain`, which fails."""
    longest = max(image.size)
    width, height = (max(1, round(side / longest * edge)) for side in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _square(image: Image.Image) -> Image.Image:
    """Return the image in a white square of TILE pixels; a small one is enlarged by an integer factor, so that its pixels stay sharp."""
    rgb = image.convert("RGB")
    factor = TILE // max(rgb.size)
    enlarged = (rgb.width * factor, rgb.height * factor)
    rgb = rgb.resize(enlarged, Image.Resampling.NEAREST) if factor >= 2 else scaled(rgb, TILE)
    canvas = Image.new("RGB", (TILE, TILE), "white")
    canvas.paste(rgb, ((TILE - rgb.width) // 2, (TILE - rgb.height) // 2))
    return canvas
