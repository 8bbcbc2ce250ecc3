"""Nearest neighbours against a full sort of float64 distances, ties included."""

import numpy as np
import pytest

from dml_core.errors import EvaluationError
from dml_core.evaluation.config import Metric
from dml_core.evaluation.geometry import all_squared_distances, as_points, squared_distances
from dml_core.evaluation.neighbours import nearest
from tests.evaluation.cases import KINDS, make_inputs


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("exclude_self", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_those_of_a_stable_sort(kind: str, exclude_self: bool, metric: Metric) -> None:
    embeddings, _ = make_inputs(kind)
    k = min(4, len(embeddings) - exclude_self)
    indices, similarities = nearest(embeddings, embeddings, k, exclude_self, metric)
    units = embeddings.astype(np.float64)
    if metric == "cosine":
        units /= np.sqrt(np.einsum("nd,nd->n", units, units))[:, None]
    distances = np.square(units[:, None] - units).sum(axis=2).astype(np.float32)
    if exclude_self:
        np.fill_diagonal(distances, np.inf)
    expected = np.argsort(distances, axis=1, kind="stable")[:, :k]
    assert (indices.dtype, similarities.dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(indices, expected)
    near = np.take_along_axis(distances, expected, axis=1).astype(np.float64)
    np.testing.assert_allclose(similarities, 1 - near / 2 if metric == "cosine" else -np.sqrt(near), atol=1e-6)


def test_ties_beyond_the_first_candidates_are_searched_for() -> None:
    """A hundred copies of one item: FAISS returns any of them, the rule asks for those of lowest index."""
    gallery = np.concatenate([np.full((100, 3), [1, 0, 0]), np.eye(3)]).astype(np.float32)
    indices, similarities = nearest(gallery, gallery[[99, 50, 102]], 3, exclude_self=False)
    assert indices.tolist() == [[0, 1, 2], [0, 1, 2], [102, 0, 1]]
    assert similarities.tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]


def test_candidates_that_float32_cannot_order_are_searched_for() -> None:
    """Two clusters far apart, each of 75 points almost equally far from each other, every point twice: after itself and its double comes
    the one that is nearest by a hair, which FAISS's rounding puts anywhere among the others.
    """
    corners = np.repeat(np.concatenate([np.eye(75), np.eye(75)]), 2, axis=0)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((76, 76))).Q
    gallery = (np.column_stack([corners, np.repeat([-100, 100], 150)]) @ rotation).astype(np.float32)
    indices, _ = nearest(gallery, gallery, 3, exclude_self=False, metric="euclidean")
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
        single = squared_distances(left, rows[4:5], right, columns[4999:])
        assert single[0] == block[4, 4999]


@pytest.mark.parametrize(
    ("num_queries", "k", "exclude_self", "pattern"),
    [
        (4, 4, True, r"^k = 4 neighbours were asked for; this gallery offers 1 to 3$"),
        (4, 0, False, r"^k = 0 neighbours were asked for; this gallery offers 1 to 4$"),
        (3, 1, True, r"^exclude_self needs the queries to be the gallery; found 3 and 4 rows$"),
    ],
)
def test_impossible_requests_are_refused(num_queries: int, k: int, exclude_self: bool, pattern: str) -> None:
    with pytest.raises(EvaluationError, match=pattern):
        nearest(np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)[:num_queries], k, exclude_self)


def test_other_dimensions_are_refused() -> None:
    with pytest.raises(EvaluationError, match=r"^gallery has 4 dimensions but queries 2$"):
        nearest(np.eye(4, dtype=np.float32), np.eye(2, dtype=np.float32), 1, exclude_self=False)


@pytest.mark.parametrize("name", ["gallery", "queries"])
def test_what_cannot_be_compared_is_refused_by_its_name(name: str) -> None:
    given = {"gallery": np.eye(4, dtype=np.float32), "queries": np.eye(4, dtype=np.float32)}
    given[name][2, 1] = np.nan
    with pytest.raises(EvaluationError, match=rf"^{name}: NaN, infinite or huge values in 1 of 4 rows \(2\); find out what the network"):
        nearest(**given, k=1, exclude_self=True)


def test_an_absent_gpu_is_an_error_and_no_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faiss.get_num_gpus", lambda: 0)
    with pytest.raises(EvaluationError, match=r"^device 'cuda' was asked for but FAISS finds no GPU here; use device: cpu$"):
        nearest(np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32), 1, exclude_self=True, device="cuda")
