"""Embeddings of two or three dimensions with their classes' directions (heated-up softmax, Figures 3 and 4; SGSL, Figure 3).

In 2-D, points are drawn unchanged; a diamond is a class's direction, drawn slightly inside the points. If all have unit length, a ring
around them shows the count of each class by direction, because points on the circle overlap. In 3-D, two hemispheres are seen from both
ends of one axis, so that no point is hidden behind another.

Shapes: N samples, D dimensions, C classes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from dml_core.figures.canvas import class_colour, new_figure, plain_text, write_png

Floats = NDArray[np.float64]
LIGHT = "#BBBBBB"
DIAMOND_AT = 0.9  # of the points' radius, as in heated-up softmax's released code
RING_FROM, RING_HEIGHT, NUM_BINS = 1.06, 0.5, 180
EDGE = 1.65
MAX_NAMED_CLASSES = 20


def plot_directions(
    points_ND: Floats, labels_N: NDArray[np.int64], class_names: Sequence[str], directions_CD: Floats, path: Path, title: str
) -> Path:
    """Draw the points, coloured by class, and the directions of the classes; return `path`.

    Args:
        points_ND: D is 2 or 3.
        labels_N: indices into `class_names`.
        class_names: shown in the legend if they are few.
        directions_CD: of unit length.
    """
    colours = [class_colour(code, len(class_names)) for code in range(len(class_names))]
    is_plane = points_ND.shape[1] == 2
    figure = new_figure(7.4 if is_plane else 9.6, 5.8 if is_plane else 5.0)
    is_unit = bool(np.allclose(np.linalg.norm(points_ND, axis=1), 1, atol=1e-4))
    if is_plane:
        axes = _plain_axes(figure.add_subplot())
        (_draw_circle if is_unit else _draw_plane)(axes, points_ND, labels_N, directions_CD, colours)
    else:
        _draw_halves(figure.subplots(1, 2), points_ND, labels_N, directions_CD, colours, is_unit)
    if len(class_names) <= MAX_NAMED_CLASSES:
        handles: list[Any] = [Line2D([], [], marker="o", linestyle="", color=colour) for colour in colours]
        handles.append(Line2D([], [], marker="D", linestyle="", color="white", markeredgecolor="black"))
        names = [*(plain_text(name) for name in class_names), "class direction"]
        figure.legend(handles, names, frameon=False, fontsize="small", loc="outside right center")
    figure.suptitle(plain_text(title), fontsize=10)
    return write_png(figure, path)


def _draw_circle(axes: Any, points_N2: Floats, labels_N: NDArray[np.int64], directions_C2: Floats, colours: list[Any]) -> None:
    """Draw points on the unit circle, and the ring of counts around it."""
    turn = np.linspace(0, 2 * np.pi, 361)
    axes.plot(np.cos(turn), np.sin(turn), color=LIGHT, linewidth=0.6, zorder=0)
    _scatter(axes, points_N2, labels_N, colours, 10)
    _draw_ring(axes, points_N2, labels_N, colours)
    _draw_diamonds(axes, DIAMOND_AT * directions_C2, colours)
    axes.set(xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE), xticks=[-1, 0, 1], yticks=[-1, 0, 1])


def _draw_ring(axes: Any, points_N2: Floats, labels_N: NDArray[np.int64], colours: list[Any]) -> None:
    """Draw a histogram of each class's angles, with bars pointing outwards; the fullest bin of all has the ring's whole height."""
    angles_N = np.arctan2(points_N2[:, 1], points_N2[:, 0])
    edges = np.linspace(-np.pi, np.pi, NUM_BINS + 1)
    counts = [np.histogram(angles_N[labels_N == code], edges)[0] for code in range(len(colours))]
    highest = max(int(count.max()) for count in counts)
    for count, colour in zip(counts, colours, strict=True):
        radii = RING_FROM + RING_HEIGHT * np.repeat(count, 2) / highest
        outline = np.repeat(edges, 2)[1:-1]
        x, y = (np.concatenate([radii * turn(outline), RING_FROM * turn(outline[::-1])]) for turn in (np.cos, np.sin))
        axes.fill(x, y, color=colour, alpha=0.55, linewidth=0)


def _draw_plane(axes: Any, points_N2: Floats, labels_N: NDArray[np.int64], directions_C2: Floats, colours: list[Any]) -> None:
    """Draw points anywhere, with a line from the origin along each class's direction."""
    _scatter(axes, points_N2, labels_N, colours, 5)
    radius = float(np.quantile(np.linalg.norm(points_N2, axis=1), 0.9)) or 1.0
    for (x, y), colour in zip(radius * directions_C2, colours, strict=True):
        axes.plot([0, x], [0, y], color="black", linewidth=1.6, zorder=3)
        axes.plot([0, x], [0, y], color=colour, linewidth=0.9, zorder=3)
    _draw_diamonds(axes, radius * directions_C2, colours)


def _draw_halves(
    all_axes: Any, points_N3: Floats, labels_N: NDArray[np.int64], directions_C3: Floats, colours: list[Any], is_unit: bool
) -> None:
    """Draw the half-spaces on both sides of the plane of largest scatter through the origin, each seen from its own side."""
    sample_S3 = points_N3[:: max(1, len(points_N3) // 5000)]
    frame_33 = np.linalg.svd(sample_S3, full_matrices=len(sample_S3) < 3)[2]  # full, it has also a matrix (S, S)
    across, up, toward = frame_33
    radius = 1.0 if is_unit else float(np.linalg.norm(points_N3, axis=1).max())
    turn = np.linspace(0, 2 * np.pi, 361)
    for side, axes, name in zip((1.0, -1.0), all_axes, ("one half", "the other half"), strict=True):
        _plain_axes(axes)
        view_32 = np.stack([side * across, up], axis=1)
        is_here, is_drawn = side * (points_N3 @ toward) >= 0, side * (directions_C3 @ toward) >= 0
        axes.plot(radius * np.cos(turn), radius * np.sin(turn), color=LIGHT, linewidth=0.8, zorder=0)
        _scatter(axes, points_N3[is_here] @ view_32, labels_N[is_here], colours, 5)
        drawn = [colour for colour, drawn_here in zip(colours, is_drawn, strict=True) if drawn_here]
        _draw_diamonds(axes, radius * directions_C3[is_drawn] @ view_32, drawn)
        axes.set(xlim=(-1.08 * radius, 1.08 * radius), ylim=(-1.08 * radius, 1.08 * radius), xticks=[], yticks=[])
        axes.set_title(f"{name}, {int(is_here.sum())} images", fontsize=9)


def _scatter(axes: Any, points_N2: Floats, labels_N: NDArray[np.int64], colours: list[Any], area: float) -> None:
    """Draw points in the order of the samples, so that no class covers all others."""
    shade = [colours[label] for label in labels_N.tolist()]
    axes.scatter(points_N2[:, 0], points_N2[:, 1], s=area, c=shade, alpha=0.5, linewidths=0, rasterized=True)


def _draw_diamonds(axes: Any, places_C2: Floats, colours: list[Any]) -> None:
    if len(places_C2):
        axes.scatter(places_C2[:, 0], places_C2[:, 1], marker="D", s=70, c=colours, edgecolors="black", linewidths=1.0, zorder=5)


def _plain_axes(axes: Any) -> Any:
    axes.set_aspect("equal", adjustable="box")
    axes.spines[:].set(color=LIGHT)
    axes.tick_params(labelsize="small", color=LIGHT)
    return axes
