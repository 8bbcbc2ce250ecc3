"""The figures of one run: training curves, similarities of pairs, retrieved images for some queries, and a map of the embeddings.

Retrieval figure and map use a sample of the queries that have an image of their class to find: all of them if there are at most
MAX_QUERIES, otherwise classes in random order with a limited number of queries each. Only their nearest neighbours are searched, in the
whole gallery.

Shapes: N gallery items, Q queries, L sampled queries, k neighbours.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.epochs import CURVE, RECALL
from dml_core.evaluation.config import EvaluationConfig, Metric
from dml_core.evaluation.retrieval.outcomes import QueryOutcomes, query_outcomes
from dml_core.figures.curves import plot_training_curves
from dml_core.figures.gallery import plot_retrieval_gallery, retrieved_row
from dml_core.figures.histograms import has_pairs, plot_similarity_histogram
from dml_core.figures.maps import plot_map

CURVE_FILE, HISTOGRAM_FILE, GALLERY_FILE, MAP_FILE = "curve.png", "similarities.png", "gallery.png", "map.png"
MAX_QUERIES, MIN_PER_CLASS = 1000, 25
NUM_ROWS_OF_A_KIND, NUM_NEIGHBOURS = 4, 8
NUM_NAMED_OF_A_KIND = 5
NOT_DRAWN = ("epoch", "step", "learning_rate_factor")
SCORED = {  # names of the epochs' scores in a history -> titles of their panels
    RECALL["best_validation"]: "Recall@1 on held-out classes",
    RECALL["oracle"]: "Recall@1 on the test classes",
    CURVE["train"]: "Recall@1 of training images",
    CURVE["test"]: "Recall@1 of test images",
}


@dataclass(frozen=True)
class Retrieval:
    """Sampled queries and their neighbours.

    Attributes:
        num_scored: number of queries that have an image of their class to find.
        queries: (L,) the sample of these.
        outcomes: what each of them finds.
    """

    num_scored: int
    queries: NDArray[np.int64]
    outcomes: QueryOutcomes


def draw_figures(
    queries: EmbeddedImages, gallery: EmbeddedImages, metric: Metric, seed: int, title: str, history: list[dict[str, float]], folder: Path
) -> None:
    """Draw all figures of a run into `folder`, without those that it has no data for.

    A curve needs a history, a histogram of similarities two images of one class and an image of another, and a map three queries.

    Args:
        queries: the queries; the gallery itself if there are no separate queries.
        metric: for the similarities.
        seed: for every random draw.
        title: name of the run and its score.

    Raises:
        EvaluationError: the embeddings cannot be drawn.
    """
    if history:
        draw_curves(history, folder / CURVE_FILE, title)
    embeddings, labels = gallery.embeddings, gallery.labels
    if queries is not gallery:
        embeddings, labels = np.concatenate([embeddings, queries.embeddings]), np.concatenate([labels, queries.labels])
    if has_pairs(labels):
        plot_similarity_histogram(embeddings, labels, folder / HISTOGRAM_FILE, title, metric, seed=seed)
    retrieval = look_up(queries, gallery, metric, seed)
    draw_gallery(queries, gallery, retrieval, seed, folder / GALLERY_FILE, title)
    if len(retrieval.queries) >= 3 and queries.embeddings.shape[1] >= 2:
        draw_map(queries, retrieval, metric, seed, folder / MAP_FILE, title)


def draw_curves(history: list[dict[str, float]], path: Path, title: str) -> None:
    """Draw the loss, its parts and the scores over epochs."""
    names = list(dict.fromkeys(name for row in history for name in row if name not in NOT_DRAWN))
    num_epochs = history[-1]["epoch"] + 1
    steps_per_epoch = (history[-1]["step"] + 1) / num_epochs
    curves: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for name in sorted(names, key=lambda name: name != "loss"):
        points = [((row["step"] + 1) / steps_per_epoch, row[name]) for row in history if name in row]
        curves[name in SCORED][SCORED.get(name, name)] = tuple(zip(*points, strict=True))
    # The single part of a loss equals the loss.
    losses = {name: curve for name, curve in curves[False].items() if name == "loss" or curve != curves[False]["loss"]}
    plot_training_curves(losses, path, title, curves[True])


def look_up(queries: EmbeddedImages, gallery: EmbeddedImages, metric: Metric, seed: int) -> Retrieval:
    """Return the nearest neighbours of a sample of the queries that have an image of their class to find, without the query itself."""
    is_self = queries.role == gallery.role
    classes, sizes = np.unique(gallery.labels, return_counts=True)
    scored = np.flatnonzero(np.isin(queries.labels, classes[sizes > is_self]))
    sampled = scored[choose_queries(queries.labels[scored], seed)]
    config = EvaluationConfig(metric=metric)
    asked, asked_labels = (None, None) if is_self else (queries.embeddings, queries.labels)
    outcomes = query_outcomes(gallery.embeddings, gallery.labels, config, NUM_NEIGHBOURS, asked, asked_labels, sampled)
    return Retrieval(len(scored), sampled, outcomes)


def choose_queries(labels: NDArray[Any], seed: int) -> NDArray[np.int64]:
    """Return the (L,) increasing indices of the sampled queries."""
    if len(labels) <= MAX_QUERIES:
        return np.arange(len(labels))
    generator = np.random.default_rng(seed)
    classes = generator.permutation(np.unique(labels))
    per_class = max(MIN_PER_CLASS, MAX_QUERIES // len(classes))
    chosen: list[int] = []
    for label in classes:
        chosen += generator.permutation(np.flatnonzero(labels == label))[:per_class].tolist()
        if len(chosen) >= MAX_QUERIES:
            break
    return np.sort(np.array(chosen[:MAX_QUERIES], dtype=np.int64))


def rows_to_draw(is_found: NDArray[np.bool_], labels: NDArray[Any], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the numbers of the sampled queries to show: NUM_ROWS_OF_A_KIND whose nearest neighbour is correct and as many with a wrong one,
    more of one kind if there are fewer of the other, from different classes while there are any left.

    Args:
        is_found: (L,) whether the nearest neighbour of each sampled query is correct.
        labels: (L,) classes of the sampled queries.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    right, wrong = (_of_different_classes(order[is_found[order] == is_right], labels) for is_right in (True, False))
    num_right = min(len(right), max(NUM_ROWS_OF_A_KIND, 2 * NUM_ROWS_OF_A_KIND - len(wrong)))
    return right[:num_right], wrong[: 2 * NUM_ROWS_OF_A_KIND - num_right]


def draw_gallery(queries: EmbeddedImages, gallery: EmbeddedImages, retrieval: Retrieval, seed: int, path: Path, title: str) -> None:
    """Draw some queries whose nearest neighbour is correct, then some with a wrong one, each with its neighbours."""
    is_found = retrieval.outcomes.is_found
    kinds = rows_to_draw(is_found, queries.labels[retrieval.queries], seed)
    rows = [retrieved_row(queries, gallery, retrieval.queries[number], retrieval.outcomes, number) for kind in kinds for number in kind]
    right = int(is_found.sum())
    note = (
        f"{len(kinds[0])} queries, drawn at random, of the {right} whose nearest neighbour is right, then {len(kinds[1])} of the "
        f"{len(retrieval.queries) - right} where it is wrong; {len(retrieval.queries)} of {retrieval.num_scored} queries looked at"
    )
    plot_retrieval_gallery(rows, path, title, note)


def draw_map(queries: EmbeddedImages, retrieval: Retrieval, metric: Metric, seed: int, path: Path, title: str) -> None:
    """Draw a map of the sampled queries; of many classes, those with the best and the worst Recall@1 are named.

    It uses PCA because t-SNE doubles the evaluation time of a small run, and its sums over threads differ from one run to the next.
    """
    labels = queries.labels[retrieval.queries]
    classes, codes = np.unique(labels, return_inverse=True)
    recalls = np.bincount(codes, retrieval.outcomes.is_found) / np.bincount(codes)
    order, what = np.argsort(-recalls, kind="stable"), "classes in the order of their Recall@1"
    if len(order) > 2 * NUM_NAMED_OF_A_KIND:
        order = np.concatenate([order[:NUM_NAMED_OF_A_KIND], order[-NUM_NAMED_OF_A_KIND:]])
        what = f"named: the {NUM_NAMED_OF_A_KIND} classes found best and the {NUM_NAMED_OF_A_KIND} found worst"
    names = {classes[code]: f"{queries.dataset.class_names[int(classes[code])]}, R@1 {100 * recalls[code]:.0f} %" for code in order}
    about = f"PCA of {len(labels)} of {retrieval.num_scored} queries; {what}"
    plot_map(queries.embeddings[retrieval.queries], labels, path, f"{title}\n{about}", seed, names, metric)


def _of_different_classes(numbers: NDArray[np.int64], labels: NDArray[Any]) -> NDArray[np.int64]:
    """Reorder numbers: the first of each class come before all others."""
    first = np.zeros(len(numbers), dtype=bool)
    first[np.unique(labels[numbers], return_index=True)[1]] = True
    return np.concatenate([numbers[first], numbers[~first]])
