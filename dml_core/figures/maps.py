"""Scatter plots of high-dimensional embeddings, projected to 2-D by PCA.

Shapes: N samples, D dimensions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from dml_core.evaluation.config import Metric
from dml_core.evaluation.inputs import checked_embeddings, checked_labels
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.figures.canvas import class_colour, new_figure, plain_text, write_png

MARKERS = "os^Dv*XPph<>"
SIDE_INCHES, LEGEND_INCHES = 5.6, 1.9


def plot_map(
    embeddings: ArrayLike,
    labels: ArrayLike,
    path: Path,
    title: str,
    seed: int,
    named: Mapping[Any, str],
    metric: Metric = "cosine",
) -> Path:
    """Draw embeddings (N, D), N at least 3 and D at least 2, with labels (N,) as a 2-D map, projected with a seed; return `path`.

    Args:
        named: label -> its legend text, in the legend's order; all other classes are grey points.
        metric: cosine maps directions, euclidean the unchanged embeddings.

    Raises:
        EvaluationError: embeddings and labels that do not fit, or a cosine of zeros.
    """
    embeddings_ND = checked_embeddings(embeddings)
    labels_N = checked_labels(labels, len(embeddings_ND))
    points_N2 = principal_components(embeddings_ND, metric, 2, seed)
    figure = new_figure(SIDE_INCHES + LEGEND_INCHES, SIDE_INCHES)
    axes = figure.add_subplot()
    axes.set_aspect("equal", adjustable="datalim")
    axes.spines[:].set(color="#BBBBBB")
    _scatter(figure, axes, points_N2, labels_N, named)
    axes.set(xticks=[], yticks=[])
    axes.set_title(plain_text(title), fontsize=9)
    return write_png(figure, path)


def principal_components(embeddings_ND: NDArray[Any], metric: Metric, num_components: int, seed: int) -> NDArray[np.float64]:
    """Return the first principal components (N, num_components) of the points that a metric compares.

    Raises:
        EvaluationError: cosine of a row of zeros.
    """
    from sklearn.decomposition import PCA

    points_ND = as_points(embeddings_ND, metric).rows(slice(None))
    with np.errstate(invalid="ignore"):  # equal points have no variance of which a component could have a share
        return PCA(num_components, random_state=seed).fit_transform(points_ND)


def _scatter(figure: Figure, axes: Axes, points_N2: NDArray[Any], labels_N: NDArray[Any], named: Mapping[Any, str]) -> None:
    """Draw the named classes with separate colours and markers above all others in grey, and the legend next to the map."""
    others = points_N2[~np.isin(labels_N, list(named))]
    handles, texts = [], list(named.values())
    for number, label in enumerate(named):
        style = {"marker": MARKERS[number % len(MARKERS)], "color": class_colour(number, len(named))}
        x, y = points_N2[labels_N == label].T
        handles.append(axes.scatter(x, y, s=24.0, linewidths=0, alpha=0.85, zorder=2, **style))
    if len(others):
        x, y = others.T
        handles.append(axes.scatter(x, y, s=7, linewidths=0, color="#C8C8C8", zorder=1))
        num_others = len(np.unique(labels_N)) - len(named)
        texts.append(f"{num_others} other {'class' if num_others == 1 else 'classes'}")
    figure.legend(handles, [plain_text(text) for text in texts], frameon=False, fontsize="x-small", loc="outside right upper")
