"""Figures: their marks show the data, equal arrays give equal bytes, also from several threads, and mismatched inputs are rejected."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from dml_core.errors import EvaluationError
from dml_core.evaluation.statistics.mean_ranks import Ranking, rank_systems
from dml_core.figures.canvas import COLOURS, RIGHT, WRONG, new_figure, write_png
from dml_core.figures.curves import plot_training_curves, smoothed
from dml_core.figures.gallery import GalleryRow, Neighbour, plot_retrieval_gallery, scaled, two_lines
from dml_core.figures.histograms import has_pairs, plot_similarity_histogram, sample_pairs
from dml_core.figures.maps import plot_map, principal_components
from dml_core.figures.mean_ranks import plot_mean_ranks
from dml_core.figures.over_epochs import plot_over_epochs
from dml_core.figures.recalls import _legend, plot_recalls
from dml_core.measurements.unique_centres import plot_counts


def samples(num_samples: int, num_dimensions: int, num_classes: int = 5) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    labels = np.arange(num_samples) % num_classes
    return generator.standard_normal((num_classes, num_dimensions))[labels] * 3 + generator.standard_normal(
        (num_samples, num_dimensions)
    ), labels


def pixels(path: Path) -> NDArray[np.uint8]:
    """Return the pixels (height, width, 3) of a PNG."""
    with Image.open(path, formats=["PNG"]) as image:
        return np.asarray(image.convert("RGB"))


def is_colour(path: Path, colour: str) -> NDArray[np.bool_]:
    """Return a mask (height, width) of the pixels with exactly that colour."""
    return (pixels(path) == np.round(255 * np.array(to_rgb(colour)))).all(axis=2)


def gallery_rows(mask: NDArray[np.bool_], name: str = "a") -> list[GalleryRow]:
    """Return rows of white images of several sizes and modes, right or wrong according to the mask."""
    sizes: list[tuple[str, tuple[int, int]]] = [("RGB", (30, 60)), ("L", (200, 90)), ("RGB", (64, 64))]
    neighbour = Image.new("RGB", (20, 20), "white")
    return [
        GalleryRow(Image.new(*sizes[row], "white"), name, [Neighbour(neighbour, name, 0.5, bool(is_right)) for is_right in mask[row]])
        for row in range(len(mask))
    ]


def draw_gallery(path: Path, mask: NDArray[np.bool_]) -> Path:
    return plot_retrieval_gallery(gallery_rows(mask), path)


RECALLS = {"SoftTriple": {1: [0.6, 0.5], 2: [0.7, 0.8]}, "$other_": {1: [0.4, 0.3], 2: [0.9, 0.8]}}
OVER_EPOCHS: dict[str, dict[str, dict[int, list[float]]]] = {
    "a": {"train": {4: [0.5, 0.6], 8: [0.9, 0.8]}, "test": {4: [0.2, 0.3], 8: [0.4, 0.5]}},
    "$b_": {"test": {8: [0.4]}},
}
STEPS = np.arange(60) / 10


DRAWINGS: dict[str, Callable[[Path], Path]] = {
    "curves": lambda path: plot_training_curves({"loss": (STEPS, -STEPS), "part": ([0], [1])}, path, "run", {"recall": ([1], [0.5])}),
    "recall": lambda path: plot_recalls(RECALLS, path, "Recall@K"),
    "mean ranks": lambda path: plot_mean_ranks(ranking(("a", "b with $ in it", "c" * 80, "d")), path),
    "recall over epochs": lambda path: plot_over_epochs(OVER_EPOCHS, path, "Recall@1 over epochs"),
    "recall of one seed": lambda path: plot_recalls({"a": {1: [0.6]}}, path, "Recall@K"),
    "histogram": lambda path: plot_similarity_histogram(*samples(60, 4), path, r"$\frac$", num_pairs=500),
    "gallery": lambda path: draw_gallery(path, np.array([[True, False]] * 3)),
    "named classes": lambda path: plot_map(*samples(60, 8), path, "$map_", 0, {1: "_one", 3: "$three"}),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_figure_is_a_picture_and_leaves_nothing_else(name: str, tmp_path: Path) -> None:
    path = DRAWINGS[name](tmp_path / "deep" / "figure.png")
    assert [file.name for file in path.parent.iterdir()] == ["figure.png"]
    assert pixels(path).std() > 5


def test_threads_draw_what_one_thread_draws(tmp_path: Path) -> None:
    drawings = [DRAWINGS[name] for name in ("curves", "recall", "histogram", "gallery", "named classes")]
    alone = [draw(tmp_path / f"alone{number}.png").read_bytes() for number, draw in enumerate(drawings)]
    with ThreadPoolExecutor(len(drawings)) as pool:
        paths = list(pool.map(lambda number: drawings[number](tmp_path / f"together{number}.png"), range(len(drawings))))
    assert [path.read_bytes() for path in paths] == alone


def test_each_curve_has_its_own_panel_and_colour(tmp_path: Path) -> None:
    path = plot_training_curves({"a": ([0, 1], [0, 1]), "b": ([0, 1], [1000, 0])}, tmp_path / "curves.png", "")
    first, second = (np.flatnonzero(is_colour(path, colour).any(axis=0)) for colour in COLOURS[:2])
    assert 0 < len(first) < len(second) * 1.2
    assert first.max() < second.min()
    assert not is_colour(path, COLOURS[2]).any()


def test_smoothing_by_hand() -> None:
    assert smoothed([0, 3, 6, 0, 3], 3) == pytest.approx([1.5, 3, 3, 3, 1.5])
    assert smoothed([5, 1], 1) == pytest.approx([5, 1])


def test_systems_are_sorted_by_their_mean_and_fewer_than_three_seeds_have_no_interval(tmp_path: Path) -> None:
    """Only the best system of a panel has the second colour; three seeds give an interval's line, fewer do not."""
    recalls = {"a": {1: [0.1, 0.1]}, "b": {1: [0.9, 0.9]}, "c": {1: [0.5, 0.5]}}
    best = is_colour(plot_recalls(recalls, tmp_path / "figure.png", "run"), COLOURS[1])
    rest = is_colour(tmp_path / "figure.png", COLOURS[0])
    assert np.flatnonzero(best.any(axis=1)).max() < np.flatnonzero(rest.any(axis=1)).min()
    assert np.flatnonzero(best.any(axis=0)).min() > np.flatnonzero(rest.any(axis=0)).max()
    drawn = {}
    for name, seeds in (("one", [0.5]), ("two", [0.4, 0.6]), ("three", [0.4, 0.5, 0.6])):
        picture = pixels(plot_recalls({"a": {1: [0.1] * len(seeds)}, "b": {1: seeds}}, tmp_path / f"{name}.png", "run")).astype(int)
        # The interval is a lighter shade of the dot's colour, so red is far above blue in both.
        drawn[name] = ((picture[:, :, 0] - picture[:, :, 2]) > 60).sum()
    assert drawn["three"] > 3 * drawn["one"] > 0
    assert drawn["two"] < 2 * drawn["one"], "a dot and two ticks"


@pytest.mark.parametrize(
    ("seeds", "says"),
    [
        ([5, 5], "line: its 95 % interval over 5 seeds, ticks: the seeds"),
        ([1, 3, 5], "line: its 95 % interval over 3 to 5 seeds, ticks: the seeds"),
        ([2, 1], "too few seeds for an interval, ticks: the seeds"),
        ([1], "too few seeds for an interval"),
    ],
)
def test_the_legend_of_recalls_names_the_seeds_behind_the_intervals(seeds: list[int], says: str) -> None:
    assert _legend(seeds) == f"per cent; dot: mean, {says}; number: rank of the mean"


def test_a_higher_curve_of_training_images_is_drawn_higher_in_the_panel_of_its_system(tmp_path: Path) -> None:
    def lowest_row(recall: float) -> int:
        curves = {"a": {"train": {1: [recall], 9: [recall]}, "test": {1: [0.0], 9: [0.0]}}}
        drawn = is_colour(plot_over_epochs(curves, tmp_path / "figure.png", "run"), COLOURS[1])
        return int(np.flatnonzero(drawn.sum(axis=1) > 50).max())  # the legend's sample of the line is shorter

    assert lowest_row(0.8) < lowest_row(0.4) < lowest_row(0.1)


def test_the_best_two_of_equal_means_are_both_marked(tmp_path: Path) -> None:
    one = is_colour(plot_recalls({"a": {1: [0.9]}, "b": {1: [0.5]}, "c": {1: [0.1]}}, tmp_path / "one.png", "run"), COLOURS[1]).sum()
    two = is_colour(plot_recalls({"a": {1: [0.9]}, "b": {1: [0.9]}, "c": {1: [0.1]}}, tmp_path / "two.png", "run"), COLOURS[1]).sum()
    assert two == 2 * one > 0


def test_means_of_the_same_values_in_another_order_share_a_rank(tmp_path: Path) -> None:
    """Their sums differ in the last bit: 0.1 + 0.2 + 0.3 is above 0.3 + 0.2 + 0.1."""
    dots = [
        is_colour(plot_recalls({"a": {1: [0.1, 0.2, 0.3]}, "b": {1: seeds}}, tmp_path / f"{number}.png", "run"), COLOURS[1]).sum()
        for number, seeds in enumerate(([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]))
    ]
    assert dots[0] == dots[1] > 0


def test_wrong_neighbours_and_only_they_have_a_broken_frame_in_red(tmp_path: Path) -> None:
    mask = np.array([[True, False, True], [True, True, True]])
    path = draw_gallery(tmp_path / "gallery.png", mask)
    red, green = is_colour(path, WRONG), is_colour(path, RIGHT)
    height, width = red.shape
    columns, rows = np.flatnonzero(red.any(axis=0)), np.flatnonzero(red.any(axis=1))
    # Query, a gap, three neighbours; the wrong one is the middle neighbour of the upper row.
    places = [np.flatnonzero(green[:, start:end].any(axis=0)) for start, end in ((0, columns.min()), (columns.max() + 1, width))]
    assert all(len(place) for place in places)
    assert rows.max() < 0.6 * height
    assert green[rows.max() + 1 :].any()
    # Without colours: the wrong neighbour's upper edge is interrupted, a right one's is not.
    edge = np.flatnonzero(red[rows.min()])
    assert (np.diff(edge) > 1).sum() > 5
    top = green[: height // 2].sum(axis=1).argmax()
    assert (np.diff(np.flatnonzero(green[top])) > 1).sum() < 4
    assert not is_colour(draw_gallery(tmp_path / "right.png", np.ones((2, 3), dtype=bool)), WRONG).any()


def test_a_row_with_fewer_neighbours_is_shorter(tmp_path: Path) -> None:
    rows = gallery_rows(np.ones((2, 3), dtype=bool))
    path = plot_retrieval_gallery([rows[0], GalleryRow(rows[1].image, "a", rows[1].neighbours[:1])], tmp_path / "gallery.png")
    green = is_colour(path, RIGHT)
    upper, lower = (np.flatnonzero(part.any(axis=0)).max() for part in (green[: len(green) * 6 // 10], green[len(green) * 7 // 10 :]))
    assert lower < upper - 200


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Ankle boot", "Ankle boot"),
        ("001.Black_footed_Albatross", "001.Black_footed_\nAlbatross"),
        ("Chevrolet Silverado 2500HD Regular Cab 2012", "Chevrolet Silvera…\n… Regular Cab 2012"),
        ("x" * 30, "x" * 18 + "\n" + "x" * 12),
    ],
)
def test_long_names_are_told_apart_on_two_lines(name: str, expected: str) -> None:
    assert two_lines(name) == expected
    assert max(map(len, two_lines(name).splitlines())) <= 18


def test_a_long_strip_is_drawn_a_pixel_wide(tmp_path: Path) -> None:
    sizes = [scaled(Image.new("RGB", size), 144).size for size in ((1, 400), (1000, 2), (300, 200), (100, 70))]
    assert sizes == [(1, 144), (144, 1), (144, 96), (144, 101)]
    rows = [GalleryRow(Image.new("RGB", (1, 400), "#0000FF"), "a", [])]
    blue = is_colour(plot_retrieval_gallery(rows, tmp_path / "gallery.png"), "#0000FF")
    assert np.flatnonzero(blue.any(axis=0)).size == 1
    assert np.flatnonzero(blue.any(axis=1)).size > 130  # the frame covers the ends


def test_the_legend_of_a_map_counts_the_other_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(Figure, "legend", lambda figure, handles, labels, **_: texts.append(labels[-1]))
    for num_named in (4, 3):
        plot_map(*samples(60, 8), tmp_path / "map.png", "map", 0, dict.fromkeys(range(num_named), "a"))
    assert texts == ["1 other class", "2 other classes"]


@pytest.mark.filterwarnings("error")
def test_equal_embeddings_are_one_point_without_a_warning(tmp_path: Path) -> None:
    assert (principal_components(np.ones((20, 8)), "euclidean", 2, 0) == 0).all()
    plot_map(np.ones((20, 8)), np.arange(20) % 5, tmp_path / "map.png", "map", 0, {1: "one"}, "euclidean")


def test_named_classes_are_coloured_and_the_rest_is_grey(tmp_path: Path) -> None:
    embeddings, labels = samples(60, 8)
    named = pixels(plot_map(embeddings, labels, tmp_path / "named.png", "map", 0, {1: "one"}))
    grey = (named == 0xC8).all(axis=2)[:, : named.shape[1] * 6 // 10]
    coloured = (named.max(axis=2).astype(int) - named.min(axis=2) > 60)[:, : named.shape[1] * 6 // 10]
    assert grey.any()
    assert coloured.any()


def test_a_map_by_cosine_shows_directions_and_one_by_distance_the_embeddings(tmp_path: Path) -> None:
    """Norms of several orders of magnitude hide the directions of two classes."""
    labels, generator = np.repeat([0, 1], 40), np.random.default_rng(0)
    angles = np.where(labels, 1.2, 0.4) + 0.05 * generator.standard_normal(80)
    norms = np.exp(generator.normal(0, 1.5, 80))[:, None]
    directions = np.stack([np.cos(angles), np.sin(angles), np.zeros(80)], axis=1)
    maps = {
        name: plot_map(rows, labels, tmp_path / name, "map", 0, {0: "a", 1: "b"}, metric).read_bytes()
        for name, rows, metric in (
            ("cosine.png", norms * directions, "cosine"),
            ("directions.png", directions, "euclidean"),
            ("euclidean.png", norms * directions, "euclidean"),
        )
    }
    assert maps["cosine.png"] == maps["directions.png"] != maps["euclidean.png"]
    first = principal_components(norms * directions, "cosine", 2, 0)[:, 0]
    assert first[labels == 0].max() < first[labels == 1].min() or first[labels == 1].max() < first[labels == 0].min()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=3, max_size=30).filter(has_pairs), st.integers(0, 99))
def test_pairs_are_of_one_class_or_of_two_and_never_of_one_sample(labels: list[int], seed: int) -> None:
    codes = np.unique(labels, return_inverse=True)[1]
    pairs = sample_pairs(codes, 300, seed)
    first, second = pairs["positive"]
    assert (codes[first] == codes[second]).all()
    assert (first != second).all()
    first, second = pairs["negative"]
    assert (codes[first] != codes[second]).all()
    assert set(first.tolist()) | set(second.tolist()) == set(range(len(codes)))


def test_two_classes_of_which_one_has_two_samples_have_pairs() -> None:
    assert has_pairs([0, 1, 1])
    assert not has_pairs([0, 0])
    assert not has_pairs([0, 1, 2])


def test_every_positive_pair_is_drawn_equally_often_from_its_anchor() -> None:
    first, second = sample_pairs(np.array([0, 0, 0, 1]), 30_000, seed=0)["positive"]
    counts = np.bincount(first * 4 + second, minlength=16).reshape(4, 4)
    assert counts[:3, :3][~np.eye(3, dtype=bool)] == pytest.approx(5000, rel=0.06)


REFUSALS: dict[str, Callable[[Path], Any]] = {
    "no query": lambda path: draw_gallery(path, np.ones((0, 3), dtype=bool)),
    "no system": lambda path: plot_recalls({}, path, "run"),
    "other Ks": lambda path: plot_recalls({"a": {1: [0.5]}, "b": {2: [0.5]}}, path, "run"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_drawn_is_refused_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError):
        REFUSALS[case](tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


def test_charts_of_counts_have_the_same_bars_whatever_was_counted(tmp_path: Path) -> None:
    drawn = []
    for name, counts in (("few", [1, 1, 2]), ("many", [8, 9, 9])):
        plot_counts(np.array(counts), 9, tmp_path / name, "a")
        drawn.append(is_colour(tmp_path / name, COLOURS[0]).any(axis=0).nonzero()[0])
    left, right = drawn
    width = pixels(tmp_path / "few").shape[1]
    assert left.max() < 0.4 * width
    assert right.min() > 0.7 * width
    taller = is_colour(tmp_path / "few", COLOURS[0]).sum(axis=0)[left]
    assert taller[: len(left) // 3].mean() == pytest.approx(2 * taller[-len(left) // 3 :].mean(), rel=0.05)


def ranking(names: tuple[str, ...], num_seeds: int = 12, gap: float = 9.0) -> Ranking:
    """Return a ranking of systems whose scores are `gap` apart, plus noise of deviation 1."""
    noise = np.random.default_rng(0).normal(0, 1, (len(names), num_seeds))
    scores = {name: dict(enumerate((gap * place + noise[place]).tolist())) for place, name in enumerate(names)}
    found = rank_systems("recall@1", {"d": scores})
    assert found is not None
    return found


def test_bars_of_the_diagram_join_what_is_within_the_critical_difference(tmp_path: Path) -> None:
    """Bars and their lengths: one bar joins all systems if none differ; otherwise there are several, shorter ones."""

    def bars(found: Ranking) -> list[int]:
        lengths = is_colour(plot_mean_ranks(found, tmp_path / "ranks.png"), COLOURS[1]).sum(axis=1)
        return [int(lengths[row]) for row in range(1, len(lengths)) if lengths[row] > 20 >= lengths[row - 1]]

    apart, alike = ranking(("a", "b", "c", "d", "e")), ranking(("a", "b", "c", "d", "e"), gap=0.0)
    assert len(apart.groups) > 1
    assert len(bars(apart)) == len(apart.groups)
    assert len(bars(alike)) == len(alike.groups) == 1
    inches = 4.6 * (max(alike.mean_ranks.values()) - min(alike.mean_ranks.values())) / 4
    assert bars(alike)[0] == pytest.approx(150 * (inches + 0.1), abs=12)


@pytest.mark.parametrize("layout", ["constrained", None])
def test_a_figure_is_drawn_once_to_the_pixels_of_savefig(layout: Literal["constrained"] | None, tmp_path: Path) -> None:
    def drawn() -> Figure:
        figure = new_figure(layout=layout)
        axes = figure.add_subplot(projection="3d")
        axes.plot([0, 1], [2, 5], [1, 3])
        axes.set_title("a title, and a\nsecond line")
        return figure

    write_png(drawn(), tmp_path / "ours.png")
    drawn().savefig(tmp_path / "savefig.png", dpi=150)
    ours, theirs = (np.asarray(Image.open(tmp_path / name)) for name in ("ours.png", "savefig.png"))
    np.testing.assert_array_equal(ours, theirs)
    assert len(np.unique(ours)) > 10
