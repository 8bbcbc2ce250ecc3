"""Parts of distances, by hand: blocks of rows, the origin, and the bound on float32's error."""

import tracemalloc

import numpy as np
import pytest
import torch

from dml_core.evaluation.retrieval import geometry
from dml_core.evaluation.retrieval.geometry import (
    NARROW_ROUNDING,
    all_squared_distances,
    as_points,
    as_similarities,
    blocks,
    centred,
    mean,
    narrow_error,
    origin,
    rounding_error,
)


def test_blocks_cover_all_rows_and_no_more() -> None:
    assert list(blocks(10, 4)) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert list(blocks(8, 4)) == [slice(0, 4), slice(4, 8)]
    assert list(blocks(0, 4)) == []


def test_the_origin_is_the_mean_in_float64_and_for_directions_zero_unless_all_are_alike() -> None:
    """In float32, 2^24 + 1 is 2^24. The directions (3, 4) and (4, 3) have the mean (3.5, 3.5), whose squared norm is 0.98 of 25."""
    embeddings = np.array([[2.0**24, 1], [1, 1], [1, 4]], dtype=np.float32)
    assert origin(as_points(embeddings, "euclidean")).tolist() == [(2**24 + 2) / 3, 2]
    assert origin(as_points(np.array([[3.0, 4], [4, 3]]), "cosine")).tolist() == [0, 0]
    assert origin(as_points(np.array([[1.0, 0.01], [3, -0.03]]), "cosine")).tolist() == pytest.approx([1, 0], abs=1e-4)


def test_the_mean_is_exact_in_coordinates_that_do_not_vary() -> None:
    """The sum of seven tenths is not seven times a tenth."""
    embeddings = np.array([[0.1, row] for row in range(7)])
    assert sum(embeddings[:, 0]) / 7 != 0.1
    assert mean(as_points(embeddings, "euclidean")).tolist() == [0.1, 3]
    assert mean(as_points(embeddings, "euclidean"), 2).tolist() == [0.1, 3]  # of the first and the last


@pytest.mark.parametrize("num_rows_at_once", [4096, 7])
def test_centred_points_are_unit_vectors_or_differences_whatever_the_blocks(num_rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "NUM_ROWS_AT_ONCE", num_rows_at_once)
    embeddings, zero = np.random.default_rng(0).standard_normal((30, 4)), np.array([1.0, 2, 3, 4])
    units = np.array([row / np.sqrt(row @ row) for row in embeddings])
    index = np.array([29, 3, 3, 0, 11, 28, 5, 6, 7, 8])
    for points, expected in ((as_points(embeddings, "cosine"), units - zero), (as_points(embeddings, "euclidean"), embeddings - zero)):
        np.testing.assert_allclose(centred(points, zero), expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(centred(points, zero, index, np.float64), expected[index], rtol=1e-14, atol=1e-15)
        assert centred(points, zero).dtype == np.float32


@pytest.mark.parametrize(("num_rows_at_once", "smallest_product"), [(4096, 2**12), (32, 2**12), (32, 1), (4096, 1)])
def test_all_distances_are_those_of_loops_whatever_the_blocks(
    num_rows_at_once: int, smallest_product: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "NUM_ROWS_AT_ONCE", num_rows_at_once)
    monkeypatch.setattr(geometry, "SMALLEST_PRODUCT", smallest_product)
    monkeypatch.setattr(geometry, "BYTES_AT_ONCE", 20 * num_rows_at_once)  # with 4096 all rows at once, with 32 one row
    generator = np.random.default_rng(0)
    left, right = generator.standard_normal((9, 3)), generator.standard_normal((70, 3))
    rows, columns = np.array([8, 1, 1, 4, 0]), generator.permutation(70)
    found = all_squared_distances(as_points(left, "euclidean"), rows, as_points(right, "euclidean"), columns)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [[np.float32(sum((left[i] - right[j]) ** 2)) for j in columns] for i in rows])


def test_similarities_are_cosines_or_negative_distances() -> None:
    squares = np.array([0, 1, 4], dtype=np.float32)
    assert as_similarities(squares, "cosine").tolist() == [1, 0.5, -1]
    assert as_similarities(squares, "euclidean").tolist() == [0, -1, -2]
    assert as_similarities(squares, "cosine").dtype == as_similarities(squares, "euclidean").dtype == np.float32


def test_the_bound_on_rounding_is_that_of_its_docstring() -> None:
    """84 dimensions and 16 give 100 rounding units; |a| of 3 and |b| of 1 give (3 + 1)^2 / 2 = 8."""
    norms = np.array([1, 3], dtype=np.float32)
    in_float32, in_float64 = 100 / (2**24 - 100), 100 / (2**51 - 100)
    assert rounding_error("cosine", norms, 1.0, 84).tolist() == pytest.approx([in_float32, in_float32], rel=1e-12, abs=0)
    assert rounding_error("euclidean", norms, 1.0, 84).tolist() == pytest.approx([2 * in_float32, 8 * in_float32], rel=1e-12, abs=0)
    assert rounding_error("euclidean", norms, 1.0, 84, np.float64).tolist() == pytest.approx(
        [2 * in_float64, 8 * in_float64], rel=1e-12, abs=0
    )


@pytest.mark.parametrize("num_dimensions", [2, 33, 512])
@pytest.mark.parametrize("kind", ["random", "near 1", "signs", "halfway"])
def test_a_product_of_bfloat16_is_within_its_bound(kind: str, num_dimensions: int) -> None:
    """`halfway` coordinates are close to the middle between two bfloat16 numbers, all with errors in the same direction."""
    generator = np.random.default_rng(num_dimensions)
    rows = generator.standard_normal((300, num_dimensions))
    if kind == "near 1":
        rows = 1 + 0.01 * rows
    elif kind == "signs":
        rows = np.sign(rows)
    elif kind == "halfway":
        rows = (1 + 2.0**-8 * (1 - 2.0**-8)) * np.ones_like(rows) * np.sign(rows[:, :1]) + 2.0**-12 * rows
    units = torch.from_numpy(rows / np.linalg.norm(rows, axis=1, keepdims=True)).float()
    narrow = units.bfloat16()
    losses = (units - narrow).double().norm(dim=1).numpy()
    products = torch.mm(narrow, narrow.T).double().numpy()
    errors = np.abs(products - (units.double() @ units.double().T).numpy())
    bounds = narrow_error(losses, float(losses.max()), num_dimensions)[:, None] + NARROW_ROUNDING * np.abs(products)
    assert (errors <= bounds).all()


def test_all_distances_need_no_copy_of_all_points() -> None:
    """Of queries or of gallery: either may be all images of a large class."""
    many, few = np.arange(20_000), np.arange(300)
    points = as_points(np.random.default_rng(0).standard_normal((len(many), 256), dtype=np.float32), "euclidean")
    for left, right in ((many, few), (few, many)):
        tracemalloc.start()
        distances = all_squared_distances(points, left, points, right)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most - distances.nbytes < points.raw.size * 8 / 2
