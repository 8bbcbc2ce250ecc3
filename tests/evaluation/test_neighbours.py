"""Nearest neighbours compared with a full sort of float64 distances, including ties."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dml_core.errors import EvaluationError
from dml_core.evaluation.config import Metric
from dml_core.evaluation.retrieval import neighbours
from dml_core.evaluation.retrieval.geometry import Points, all_squared_distances, as_points, squared_distances
from dml_core.evaluation.retrieval.neighbours import nearest
from tests.evaluation.cases import KINDS, make_inputs
from tests.forked import forked


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_those_of_a_stable_sort(kind: str, metric: Metric) -> None:
    embeddings, _ = make_inputs(kind)
    k = min(4, len(embeddings))
    indices, similarities = nearest(as_points(embeddings, metric), as_points(embeddings, metric), k)
    units = embeddings.astype(np.float64)
    if metric == "cosine":
        units /= np.sqrt(np.einsum("nd,nd->n", units, units))[:, None]
    distances = np.square(units[:, None] - units).sum(axis=2).astype(np.float32)
    expected = np.argsort(distances, axis=1, kind="stable")[:, :k]
    assert (indices.dtype, similarities.dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(indices, expected)
    near = np.take_along_axis(distances, expected, axis=1).astype(np.float64)
    np.testing.assert_allclose(similarities, 1 - near / 2 if metric == "cosine" else -np.sqrt(near), atol=1e-6)


def test_ties_beyond_the_first_candidates_are_searched_for() -> None:
    """A hundred copies of one item: FAISS returns any of them, the rule requires those with the lowest indices."""
    gallery = np.concatenate([np.full((100, 3), [1, 0, 0]), np.eye(3)]).astype(np.float32)
    indices, similarities = nearest(as_points(gallery, "cosine"), as_points(gallery[[99, 50, 102]], "cosine"), 3)
    assert indices.tolist() == [[0, 1, 2], [0, 1, 2], [102, 0, 1]]
    assert similarities.tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]


COLLAPSED = {
    "one point": lambda generator: np.ones((3000, 8)),
    "one point but for noise": lambda generator: 1 + 1e-9 * generator.standard_normal((3000, 8)),
    "two points": lambda generator: np.eye(8)[generator.integers(0, 2, 3000)],
    "one point and others": lambda generator: np.where(np.arange(3000)[:, None] % 3 > 0, 1.0, generator.standard_normal((3000, 8))),
    "steps": lambda generator: generator.integers(0, 2, (3000, 8)) + np.eye(8)[0] / 2,
    "far": lambda generator: 1e6 + generator.standard_normal((3000, 8)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("kind", COLLAPSED)
def test_neighbours_in_a_collapsed_gallery_are_exact_too(kind: str, metric: Metric, dtype: type) -> None:
    """More than two blocks of items, and more equally near items than candidates."""
    gallery = COLLAPSED[kind](np.random.default_rng(0)).astype(dtype)
    points = as_points(gallery, metric)
    indices, similarities = nearest(points, as_points(gallery[:600], metric), 5)
    asked = np.r_[0:20, 590:600]
    exact = np.square(points.rows(asked)[:, None] - points.rows(np.arange(3000))).sum(axis=2).astype(np.float32)
    expected = np.argsort(exact, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(indices[asked], expected)
    near = np.take_along_axis(exact, expected, axis=1)
    np.testing.assert_array_equal(similarities[asked], 1 - near / 2 if metric == "cosine" else -np.sqrt(near))


def test_directions_that_are_much_alike_need_no_second_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an untrained network. Float32 products of the directions leave every query open."""
    searched_again: list[int] = []
    search = neighbours._among_all

    def counting(gallery: Points, queries: Points, which_I: NDArray[np.int64], *rest: Any) -> Any:
        searched_again.extend(which_I)
        return search(gallery, queries, which_I, *rest)

    monkeypatch.setattr(neighbours, "_among_all", counting)
    generator = np.random.default_rng(0)
    gallery = as_points((generator.standard_normal(16) + 1e-3 * generator.standard_normal((3000, 16))).astype(np.float32), "cosine")
    nearest(gallery, gallery, 5)
    assert len(searched_again) < 30


def search_a_point(file: Path) -> None:
    """Write by how many MiB the peak memory of this process grows in a search of 4,000 items for as many queries at one point."""
    few, many = (as_points(np.ones((number, 8), np.float32), "cosine") for number in (600, 4000))
    nearest(few, few, 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    indices, _ = nearest(many, many, 8)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert indices[:3, :3].tolist() == [[0, 1, 2]] * 3
    file.write_text(str(grown // 1024))


def test_the_memory_of_a_search_does_not_grow_with_the_square_of_a_collapsed_gallery(tmp_path: Path) -> None:
    """The indices of all candidates of all queries would take 128 MB."""
    assert forked(search_a_point, tmp_path / "grown") == 0
    assert int((tmp_path / "grown").read_text()) < 100, "MiB"


def test_candidates_that_float32_cannot_order_are_searched_for() -> None:
    """Two distant clusters of 75 almost equidistant points, every point twice: after a point and its duplicate, the next neighbour is so
    little nearer that FAISS's rounding may rank it anywhere among the others.
    """
    corners = np.repeat(np.concatenate([np.eye(75), np.eye(75)]), 2, axis=0)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((76, 76))).Q
    gallery = (np.column_stack([corners, np.repeat([-100, 100], 150)]) @ rotation).astype(np.float32)
    indices, _ = nearest(as_points(gallery, "euclidean"), as_points(gallery, "euclidean"), 3)
    distances = np.square(gallery[:, None].astype(np.float64) - gallery).sum(axis=2).astype(np.float32)
    np.testing.assert_array_equal(indices, np.argsort(distances, axis=1, kind="stable")[:, :3])


def test_distances_do_not_depend_on_how_the_pairs_are_fetched() -> None:
    generator = np.random.default_rng(0)
    for num_dimensions in (1, 3, 7, 64, 513):
        left, right = (as_points(generator.standard_normal((n, num_dimensions)).astype(np.float32), "cosine") for n in (23, 5000))
        rows, columns = np.arange(23), np.arange(5000)
        block = all_squared_distances(left, rows, right, columns)
        pairs = squared_distances(left, rows.repeat(5000), right, np.tile(columns, 23)).reshape(block.shape)
        np.testing.assert_array_equal(block, pairs)
        np.testing.assert_array_equal(block.T, all_squared_distances(right, columns, left, rows))
        origin_D = generator.standard_normal(num_dimensions)  # any point works
        np.testing.assert_array_equal(block, all_squared_distances(left, rows, right, columns, origin_D))
        single = squared_distances(left, rows[4:5], right, columns[4999:])
        assert single[0] == block[4, 4999]


def test_an_absent_gpu_is_an_error_and_no_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faiss.get_num_gpus", lambda: 0)
    with pytest.raises(EvaluationError, match=r"^device 'cuda' was asked for but FAISS finds no GPU here; use device: cpu$"):
        nearest(as_points(np.eye(4), "cosine"), as_points(np.eye(4), "cosine"), 1, "cuda")
