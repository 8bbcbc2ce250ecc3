"""Histograms of the similarities of positive and of negative pairs: their separation, independent of a threshold.

Shapes: N samples, D dimensions, P pairs.
"""

from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dml_core.evaluation.config import Metric
from dml_core.evaluation.inputs import checked_embeddings, checked_labels, label_codes
from dml_core.evaluation.retrieval.geometry import as_points, as_similarities, squared_distances
from dml_core.figures.canvas import COLOURS, plain_text, single_axes, write_png

NUM_BINS = 80


def plot_similarity_histogram(
    embeddings: ArrayLike,
    labels: ArrayLike,
    path: Path,
    title: str,
    metric: Metric = "cosine",
    num_pairs: int = 20_000,
    seed: int = 0,
) -> Path:
    """Draw the densities of the cosines, or negative distances, of random positive and negative pairs; return `path`.

    `num_pairs` of each kind are drawn, with replacement, from the embeddings (N, D) with labels (N,), which have both (`has_pairs`).
    """
    points = as_points(checked_embeddings(embeddings), metric)
    codes_N = label_codes([checked_labels(labels, len(points))])[1][0]
    similarities = {
        name: as_similarities(squared_distances(points, first_P, points, second_P), metric)
        for name, (first_P, second_P) in sample_pairs(codes_N, num_pairs, seed).items()
    }
    figure, axes = single_axes(plain_text(title), "cosine similarity" if metric == "cosine" else "negative distance", "density")
    everything = np.concatenate(list(similarities.values()))
    bins = np.linspace(float(everything.min()), float(everything.max()) + 1e-6, NUM_BINS + 1).tolist()  # in float32 bins may coincide
    for (name, values_P), colour in zip(similarities.items(), COLOURS, strict=False):
        label = f"{name} pairs, mean {values_P.mean():.2f}"
        axes.hist(values_P, bins=bins, density=True, histtype="stepfilled", alpha=0.55, color=colour, label=label)
    axes.legend(frameon=False, loc="upper left")
    return write_png(figure, path)


def has_pairs(labels: ArrayLike) -> bool:
    """Return whether samples of these labels (N,) have a positive and a negative pair."""
    sizes = np.unique(np.asarray(labels), return_counts=True)[1]
    return len(sizes) > 1 and bool((sizes > 1).any())


def sample_pairs(codes_N: NDArray[np.int64], num_pairs: int, seed: int) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return random "positive" and "negative" pairs, two index arrays (P,) each: a sample and one of its or another class."""
    generator = np.random.default_rng(seed)
    order_N = np.argsort(codes_N, kind="stable")
    sorted_N = codes_N[order_N]
    start_N = np.searchsorted(sorted_N, sorted_N, side="left")
    size_N = np.searchsorted(sorted_N, sorted_N, side="right") - start_N
    anchor_P = generator.choice(np.flatnonzero(size_N > 1), num_pairs)
    other_P = start_N[anchor_P] + generator.integers(0, size_N[anchor_P] - 1)
    positives = anchor_P, other_P + (other_P >= anchor_P)
    anchor_P = generator.integers(0, len(codes_N), num_pairs)
    other_P = generator.integers(0, len(codes_N) - size_N[anchor_P])
    negatives = anchor_P, other_P + np.where(other_P >= start_N[anchor_P], size_N[anchor_P], 0)
    return {name: (order_N[a], order_N[b]) for name, (a, b) in (("positive", positives), ("negative", negatives))}
