"""Retrieval galleries as in the papers' figures: a query on the left, its nearest neighbours after it, wrong ones framed in red.

Shapes: Q queries, k neighbours.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dml_core.errors import EvaluationError
from dml_core.figures.canvas import NEUTRAL, RIGHT, WRONG, new_figure, write_png

INCHES_PER_IMAGE = 1.15
GAP_AFTER_QUERY = 0.18


def plot_retrieval_gallery(
    query_images: Sequence[Image.Image],
    neighbour_images: Sequence[Sequence[Image.Image]],
    correct_mask: NDArray[np.bool_],
    path: Path,
    query_titles: Sequence[str] = (),
    neighbour_titles: Sequence[Sequence[str]] = (),
) -> Path:
    """One row for each query; returns `path`.

    Args:
        query_images: Q images of any size and mode.
        neighbour_images: k images for each query, nearest first.
        correct_mask: (Q, k), whether the neighbour is of the query's class.
        path: the PNG.
        query_titles: a short text above each query (its class).
        neighbour_titles: a short text above each neighbour (its class, its similarity).

    Raises:
        EvaluationError: no query, or images and mask that do not fit.
    """
    num_queries, num_neighbours = correct_mask.shape
    if (
        num_queries == 0
        or [len(row) for row in neighbour_images] != [num_neighbours] * len(query_images)
        or len(query_images) != num_queries
    ):
        raise EvaluationError(f"gallery: images do not fit the mask of {num_queries} queries and {num_neighbours} neighbours")
    figure = new_figure((num_neighbours + 1 + GAP_AFTER_QUERY) * INCHES_PER_IMAGE, (num_queries + 0.35) * INCHES_PER_IMAGE)
    ratios = [1.0, GAP_AFTER_QUERY] + [1.0] * num_neighbours
    grid = figure.add_gridspec(num_queries, len(ratios), width_ratios=ratios)
    for row in range(num_queries):
        title = query_titles[row] if query_titles else ""
        _draw_image(figure.add_subplot(grid[row, 0]), query_images[row], NEUTRAL, title)
        for column in range(num_neighbours):
            colour = RIGHT if correct_mask[row, column] else WRONG
            title = neighbour_titles[row][column] if neighbour_titles else ""
            _draw_image(figure.add_subplot(grid[row, column + 2]), neighbour_images[row][column], colour, title)
    figure.suptitle("query, then its neighbours, nearest first; wrong ones in red", fontsize="small", color=NEUTRAL)
    return write_png(figure, path)


def _draw_image(axes: Axes, image: Image.Image, colour: str, title: str) -> None:
    """The image letterboxed into a square, in a frame."""
    axes.imshow(np.asarray(_square(image)))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set(color=colour, linewidth=3 if colour == WRONG else 1.5)
    axes.set_title(title, fontsize=6, pad=2, color=colour)


def _square(image: Image.Image, side_pixels: int = 160) -> Image.Image:
    rgb = ImageOps.contain(image.convert("RGB"), (side_pixels, side_pixels))
    canvas = Image.new("RGB", (side_pixels, side_pixels), "white")
    canvas.paste(rgb, ((side_pixels - rgb.width) // 2, (side_pixels - rgb.height) // 2))
    return canvas
