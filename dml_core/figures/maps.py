"""Scatter plots of high-dimensional embeddings, projected to 2-D.

Shapes: N samples, D dimensions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from dml_core.errors import EvaluationError
from dml_core.evaluation.inputs import checked_embeddings, checked_labels, label_codes
from dml_core.figures.canvas import COLOURS, new_figure, plain_text, write_png

MAX_NAMED_CLASSES = 12
MAX_DRAWN_POINTS = 5000
MARKERS = "os^Dv*XPph<>"
SIDE_INCHES, LEGEND_INCHES = 5.6, 1.9


def plot_map(
    embeddings: ArrayLike,
    labels: ArrayLike,
    path: Path,
    method: Literal["pca", "tsne"] = "pca",
    title: str | None = None,
    seed: int = 0,
    named: Mapping[Any, str] | None = None,
) -> Path:
    """Draw embeddings of any dimension as a 2-D map, coloured by class; return `path`.

    t-SNE uses cosines. Above MAX_DRAWN_POINTS samples, a random subset of that size is drawn, and the title states this.

    Args:
        embeddings: (N, D).
        labels: (N,).
        path: the PNG.
        method: the projection.
        title: title of the map.
        seed: seed of the draw and of the projection.
        named: label -> its legend text, in the legend's order; all other classes are grey points. None colours all classes and names them
            if they are few.

    Raises:
        EvaluationError: fewer than three samples or two dimensions, or embeddings and labels that do not fit.
    """
    embeddings_ND = checked_embeddings(embeddings)
    labels_N = checked_labels(labels, len(embeddings_ND))
    if len(embeddings_ND) < 3 or embeddings_ND.shape[1] < 2:
        raise EvaluationError(f"a map needs three samples of two dimensions or more, found {embeddings_ND.shape}")
    drawn = np.sort(np.random.default_rng(seed).permutation(len(labels_N))[:MAX_DRAWN_POINTS])
    points_N2 = _project(embeddings_ND[drawn].astype(np.float64), method, seed)
    figure = new_figure(SIDE_INCHES if named is None else SIDE_INCHES + LEGEND_INCHES, SIDE_INCHES)
    axes = figure.add_subplot()
    axes.set_aspect("equal", adjustable="datalim")
    axes.spines[:].set(color="#BBBBBB")
    if named is None:
        _scatter(axes, points_N2, labels_N[drawn])
    else:
        _scatter_named(figure, axes, points_N2, labels_N[drawn], named)
    shown = f", {len(drawn)} of {len(labels_N)} samples" if len(drawn) < len(labels_N) else ""
    axes.set(xticks=[], yticks=[])
    axes.set_title(plain_text((title or {"pca": "PCA", "tsne": "t-SNE"}[method]) + shown), fontsize=9)
    return write_png(figure, path)


def _project(embeddings_ND: NDArray[np.float64], method: str, seed: int) -> NDArray[np.float64]:
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(embeddings_ND) - 1) / 3)
    tsne = TSNE(2, perplexity=perplexity, metric="cosine", init="random", random_state=seed)
    projected_N2: NDArray[np.float64] = (PCA(2, random_state=seed) if method == "pca" else tsne).fit_transform(embeddings_ND)
    return projected_N2


def _scatter(axes: Any, points_N2: NDArray[Any], labels_N: NDArray[Any]) -> None:
    names, (codes_N,) = label_codes([labels_N])
    is_named = len(names) <= MAX_NAMED_CLASSES
    size = float(np.clip(20_000 / len(labels_N), 4, 24))
    for code, name in enumerate(names.tolist()):
        members = points_N2[codes_N == code]
        axes.scatter(*members.T, s=size, color=_colour(code, len(names)), alpha=0.7, linewidths=0, label=str(name) if is_named else None)
    if is_named:
        axes.legend(frameon=False, fontsize="small", markerscale=1.5, loc="best")


def _scatter_named(figure: Figure, axes: Axes, points_N2: NDArray[Any], labels_N: NDArray[Any], named: Mapping[Any, str]) -> None:
    """Draw the named classes with separate colours and markers above all others in grey, and the legend next to the map."""
    others = points_N2[~np.isin(labels_N, list(named))]
    handles, texts = [], list(named.values())
    for number, label in enumerate(named):
        style = {"marker": MARKERS[number % len(MARKERS)], "color": _colour(number, len(named))}
        x, y = points_N2[labels_N == label].T
        handles.append(axes.scatter(x, y, s=24.0, linewidths=0, alpha=0.85, zorder=2, **style))
    if len(others):
        x, y = others.T
        handles.append(axes.scatter(x, y, s=7, linewidths=0, color="#C8C8C8", zorder=1))
        texts.append(f"{len(np.unique(labels_N)) - len(named)} other classes")
    figure.legend(handles, [plain_text(text) for text in texts], frameon=False, fontsize="x-small", loc="outside right upper")


def _colour(code: int, num_classes: int) -> Any:
    """Return distinguishable colours for few classes, else the circle of hues."""
    if num_classes <= len(COLOURS):
        return COLOURS[code]
    return colormaps["tab20" if num_classes <= 20 else "hsv"](code / num_classes)
