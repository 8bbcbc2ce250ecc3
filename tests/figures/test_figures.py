"""Figures: what is drawn is in the picture, the same arrays give the same bytes, also from several threads, and misfits are refused."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from numpy.typing import NDArray
from PIL import Image

from dml_core.errors import EvaluationError
from dml_core.figures.canvas import COLOURS, RIGHT, WRONG
from dml_core.figures.curves import plot_curves, plot_recall_curves
from dml_core.figures.gallery import plot_retrieval_gallery
from dml_core.figures.histograms import plot_similarity_histogram, sample_pairs
from dml_core.figures.maps import plot_embeddings, plot_map


def samples(num_samples: int, num_dimensions: int, num_classes: int = 5) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    labels = np.arange(num_samples) % num_classes
    return generator.standard_normal((num_classes, num_dimensions))[labels] * 3 + generator.standard_normal(
        (num_samples, num_dimensions)
    ), labels


def pixels(path: Path) -> NDArray[np.uint8]:
    """(height, width, 3), of a PNG."""
    with Image.open(path, formats=["PNG"]) as image:
        return np.asarray(image.convert("RGB"))


def is_colour(path: Path, colour: str) -> NDArray[np.bool_]:
    """Pixels (height, width) of exactly that colour."""
    return (pixels(path) == np.round(255 * np.array(to_rgb(colour)))).all(axis=2)


def draw_gallery(path: Path, mask: NDArray[np.bool_]) -> Path:
    images = [Image.new(mode, size, "white") for mode, size in [("RGB", (30, 60)), ("L", (200, 90)), ("RGB", (64, 64))]][: len(mask)]
    return plot_retrieval_gallery(images, [[Image.new("RGB", (20, 20), "white")] * mask.shape[1] for _ in mask], mask, path)


DRAWINGS: dict[str, Callable[[Path], Path]] = {
    "curves": lambda path: plot_curves({"loss": ([0, 1, 2], [3, 2, 1]), "other": ([0, 1], [1, 1])}, path, "Loss", "epoch", "loss"),
    "recall": lambda path: plot_recall_curves({"SoftTriple": {1: 0.6, 2: 0.7, 8: 0.9}}, path),
    "histogram": lambda path: plot_similarity_histogram(*samples(60, 4), path, num_pairs=500),
    "gallery": lambda path: draw_gallery(path, np.array([[True, False]] * 3)),
    "pca": lambda path: plot_map(*samples(60, 8), path),
    "t-SNE": lambda path: plot_map(*samples(30, 8), path, "tsne"),
    "flat": lambda path: plot_embeddings(*samples(30, 2), path, np.zeros((5, 1, 2))),
    "solid": lambda path: plot_embeddings(*samples(30, 3), path, np.ones((5, 2, 3))),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "t-SNE")) for name in DRAWINGS])
def test_every_figure_is_a_picture_and_leaves_nothing_else(name: str, tmp_path: Path) -> None:
    path = DRAWINGS[name](tmp_path / "deep" / "figure.png")
    assert [file.name for file in path.parent.iterdir()] == ["figure.png"]
    assert pixels(path).std() > 5


def test_threads_draw_what_one_thread_draws(tmp_path: Path) -> None:
    drawings = [DRAWINGS[name] for name in ("curves", "recall", "histogram", "pca")]
    alone = [draw(tmp_path / f"alone{number}.png").read_bytes() for number, draw in enumerate(drawings)]
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda number: drawings[number](tmp_path / f"together{number}.png"), range(4)))
    assert [path.read_bytes() for path in paths] == alone


def test_each_curve_has_its_own_colour(tmp_path: Path) -> None:
    path = plot_curves({"a": ([0, 1], [0, 1]), "b": ([0, 1], [1, 0])}, tmp_path / "curves.png", "", "", "")
    assert all(is_colour(path, colour).any() for colour in COLOURS[:2])
    assert not is_colour(path, COLOURS[2]).any()


def test_wrong_neighbours_and_only_they_are_framed_in_red(tmp_path: Path) -> None:
    mask = np.array([[True, False, True], [True, True, True]])
    path = draw_gallery(tmp_path / "gallery.png", mask)
    red, green = is_colour(path, WRONG), is_colour(path, RIGHT)
    height, width = red.shape
    columns = np.flatnonzero(red.any(axis=0))
    # Columns of equal width: query, a narrow gap, three neighbours; the wrong one is the middle neighbour of the upper row.
    assert 0.45 * width < columns.min() < columns.max() < 0.76 * width
    assert np.flatnonzero(red.any(axis=1)).max() < 0.56 * height
    assert green[height // 2 :].any()
    assert not is_colour(draw_gallery(tmp_path / "right.png", np.ones((2, 3), dtype=bool)), WRONG).any()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=3, max_size=30), st.integers(0, 99))
def test_pairs_are_of_one_class_or_of_two_and_never_of_one_sample(labels: list[int], seed: int) -> None:
    codes = np.unique(labels, return_inverse=True)[1]
    if codes.max() == 0 or len(codes) == codes.max() + 1:
        with pytest.raises(EvaluationError, match="two classes"):
            sample_pairs(codes, 10, seed)
        return
    pairs = sample_pairs(codes, 300, seed)
    first, second = pairs["positive"]
    assert (codes[first] == codes[second]).all()
    assert (first != second).all()
    first, second = pairs["negative"]
    assert (codes[first] != codes[second]).all()
    assert set(first.tolist()) | set(second.tolist()) == set(range(len(codes)))


def test_every_positive_pair_is_drawn_equally_often_from_its_anchor() -> None:
    first, second = sample_pairs(np.array([0, 0, 0, 1]), 30_000, seed=0)["positive"]
    counts = np.bincount(first * 4 + second, minlength=16).reshape(4, 4)
    assert counts[:3, :3][~np.eye(3, dtype=bool)] == pytest.approx(5000, rel=0.06)


REFUSALS: dict[str, Callable[[Path], Any]] = {
    "too few samples": lambda path: plot_map(*samples(2, 4), path),
    "one dimension": lambda path: plot_map(*samples(9, 1), path),
    "four dimensions": lambda path: plot_embeddings(*samples(9, 4), path),
    "centres of other dimensions": lambda path: plot_embeddings(*samples(9, 3), path, np.zeros((5, 1, 2))),
    "images that do not fit": lambda path: plot_retrieval_gallery([], [], np.ones((2, 3), dtype=bool), path),
    "no query": lambda path: draw_gallery(path, np.ones((0, 3), dtype=bool)),
    "one class": lambda path: plot_similarity_histogram(*samples(9, 4, num_classes=1), path),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_drawn_is_refused_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError):
        REFUSALS[case](tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())
