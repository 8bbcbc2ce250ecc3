"""Tiles of the similarity matrix: a block of float32 products, and its entries above two bounds.

An entry of a tile is its pair's nearness, OFFSET - d^2 / 2: larger is nearer. It is computed in float32, but in float64 if positives are
dense, and on a GPU, where the process's settings may reduce float32 products to TF32, for which the error bound does not hold. On the CPU
the products and comparisons are numpy's (its OpenBLAS multiplies 15 % faster here than torch's MKL, and it counts booleans many times
faster), and maxima are torch's; on a GPU only the few entries found are copied to the CPU.

Shapes: I and J points of the two sides of a tile, D dimensions, E entries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dml_core.errors import EvaluationError
from dml_core.evaluation.config import Device
from dml_core.evaluation.retrieval.geometry import NUM_ROWS_AT_ONCE, Points, blocks, centred

OFFSET = {"cosine": 1.0, "euclidean": 0.0}
LARGEST_BYTE = 255
STRIP = 64  # entries of one query
SMALLEST_NARROW_SIDE = 64  # with fewer points other kernels run, which may not sum in float32
FEW = 1 / 8  # share of a tile's strips above which comparing all together is faster


@dataclass(frozen=True)
class Side:
    """Points of one side of the tiles, sorted by class.

    Attributes:
        points: source of their exact coordinates.
        index: row in `points` of each.
        codes: class of each, ascending.
        vectors: float32 or float64 coordinates (N, D) on the device.
        norms: norms of the vectors.
        narrow: the vectors in bfloat16, or None if tiles do not use bfloat16.
        losses: norm of each vector's bfloat16 rounding error (zeros without bfloat16).
    """

    points: Points
    index: NDArray[np.int64]
    codes: NDArray[np.int64]
    vectors: Tensor
    norms: NDArray[np.float64]
    narrow: Tensor | None
    losses: NDArray[np.float64]


class Entries(NamedTuple):
    """Result of `compare`: the number of entries of at least the upper bound of each query, and the entries between its bounds."""

    num_above: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    nearness: NDArray[np.floating[Any]]


def usable_device(name: Device) -> torch.device:
    """Return the device with that name.

    Raises:
        EvaluationError: the device is missing.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise EvaluationError("device 'cuda' was asked for but there is no usable GPU here; use device: cpu")
    return torch.device(name)


def as_side(
    points: Points,
    index: NDArray[np.int64],
    codes: NDArray[np.int64],
    origin_D: NDArray[np.float64],
    device: torch.device,
    dtype: type[np.floating[Any]] = np.float32,
    is_narrow: bool = False,
) -> Side:
    """Prepare the indexed points, ordered by their classes `codes`, for tiles (in bfloat16 if `is_narrow`)."""
    vectors_ND = centred(points, origin_D, index, dtype)
    norms_N = np.sqrt(np.einsum("nd,nd->n", vectors_ND, vectors_ND, dtype=np.float64))
    vectors, losses_N, narrow = torch.from_numpy(vectors_ND).to(device), np.zeros(len(index)), None
    if is_narrow:
        narrow = vectors.to(torch.bfloat16)
        for rows in blocks(len(index), NUM_ROWS_AT_ONCE):
            losses_N[rows] = (vectors[rows] - narrow[rows]).double().norm(dim=1).cpu().numpy()
    return Side(points, index, codes, vectors, norms_N, narrow, losses_N)


def part(side: Side, rows: slice | NDArray[np.int64]) -> Side:
    """Return some of a side's points, in ascending order."""
    narrow = None if side.narrow is None else side.narrow[rows]
    return Side(side.points, side.index[rows], side.codes[rows], side.vectors[rows], side.norms[rows], narrow, side.losses[rows])


def common_classes(left_codes: NDArray[np.int64], right_codes: NDArray[np.int64]) -> Iterator[tuple[int, slice, slice]]:
    """Yield each class present in both of two ascending arrays, with its slices."""
    codes = np.intersect1d(left_codes, right_codes)
    bounds = [np.searchsorted(array, codes, side=end).tolist() for array in (left_codes, right_codes) for end in ("left", "right")]
    for code, left_start, left_stop, right_start, right_stop in zip(codes.tolist(), *bounds, strict=True):
        yield code, slice(left_start, left_stop), slice(right_start, right_stop)


def tile(left: Side, right: Side, buffer: Tensor) -> Tensor:
    """Return the nearness of all pairs (I, J), in `buffer`; pairs of one class (including self) are masked with minus infinity.

    Uses bfloat16 if both sides have it and are large enough.
    """
    is_large = min(len(left.codes), len(right.codes)) >= SMALLEST_NARROW_SIDE
    narrow = (left.narrow, right.narrow.T) if is_large and left.narrow is not None and right.narrow is not None else None
    cells = buffer.view(torch.bfloat16) if narrow else buffer
    near_IJ = cells[: len(left.codes) * len(right.codes)].view(len(left.codes), len(right.codes))
    if narrow:
        torch.mm(*narrow, out=near_IJ)
    elif near_IJ.is_cpu:
        np.matmul(left.vectors.numpy(), right.vectors.numpy().T, out=near_IJ.numpy())
    else:
        torch.mm(left.vectors, right.vectors.T, out=near_IJ)
    if left.points.metric == "euclidean":
        near_IJ -= _half_squares(left)[:, None]
        near_IJ -= _half_squares(right)
    for _, rows, columns in common_classes(left.codes, right.codes):
        near_IJ[rows, columns] = -torch.inf
    return near_IJ


def _half_squares(side: Side) -> Tensor:
    return torch.from_numpy(side.norms**2 / 2).to(side.vectors)


def compare(near_IJ: Tensor, upper: NDArray[Any], lower: NDArray[Any], axis: int) -> Entries:
    """Count entries of at least `upper` and find the others of at least `lower`; each row (`axis` 0) or column (1) has its bounds."""
    return _compare_on_cpu(near_IJ, upper, lower, axis) if near_IJ.is_cpu else _compare_on_gpu(near_IJ, upper, lower, axis)


def _compare_on_cpu(near_IJ: Tensor, upper: NDArray[Any], lower: NDArray[Any], axis: int) -> Entries:
    """Skip strips of a query's entries whose largest is below `lower`, usually most of them."""
    exact = torch.float32 if near_IJ.dtype == torch.bfloat16 else near_IJ.dtype  # numpy has no bfloat16
    num_strips, is_left_over = divmod(near_IJ.shape[1 - axis], STRIP)
    if num_strips == 0 or is_left_over:
        return _compare_all(near_IJ.to(exact).numpy(), upper, lower, axis)
    shape = (-1, num_strips, STRIP) if axis == 0 else (num_strips, STRIP, near_IJ.shape[1])
    strips_IJ = near_IJ.view(shape)
    largest_IJ = strips_IJ.amax(dim=2 - axis).to(exact).numpy()
    is_wanted_IJ = largest_IJ >= np.expand_dims(lower, 1 - axis)
    if np.count_nonzero(is_wanted_IJ) > FEW * is_wanted_IJ.size:
        return _compare_all(near_IJ.to(exact).numpy(), upper, lower, axis)
    lines_S, strips_S = np.nonzero(is_wanted_IJ if axis == 0 else is_wanted_IJ.T)
    lines, strips = torch.from_numpy(lines_S), torch.from_numpy(strips_S)
    near_SE = (strips_IJ[lines, strips] if axis == 0 else strips_IJ[strips, :, lines]).to(exact).numpy()
    above_SE, wanted_SE = near_SE >= upper[lines_S, None], near_SE >= lower[lines_S, None]
    num_above = np.bincount(lines_S, np.count_nonzero(above_SE, axis=1), minlength=near_IJ.shape[axis]).astype(np.int64)
    found_E, within_E = np.nonzero(wanted_SE ^ above_SE)
    lines_E, others_E = lines_S[found_E], strips_S[found_E] * STRIP + within_E
    rows_E, columns_E = (lines_E, others_E) if axis == 0 else (others_E, lines_E)
    return Entries(num_above, rows_E, columns_E, near_SE[found_E, within_E])


def _compare_all(near_IJ: NDArray[Any], upper: NDArray[Any], lower: NDArray[Any], axis: int) -> Entries:
    above_IJ = near_IJ >= np.expand_dims(upper, 1 - axis)
    between_IJ = near_IJ >= np.expand_dims(lower, 1 - axis)
    between_IJ ^= above_IJ
    rows_E, columns_E = np.divmod(np.flatnonzero(between_IJ), near_IJ.shape[1])
    return Entries(_count(above_IJ, axis), rows_E, columns_E, near_IJ[rows_E, columns_E])


def _count(is_above_IJ: NDArray[np.bool_], axis: int) -> NDArray[np.int64]:
    """Return the number of true entries per row (`axis` 0) or column (1): numpy's own reductions along an axis are several times slower."""
    if axis == 0:
        return np.fromiter((np.count_nonzero(row) for row in is_above_IJ), np.int64, len(is_above_IJ))
    total_J = np.zeros(is_above_IJ.shape[1], dtype=np.int64)
    for start in range(0, len(is_above_IJ), LARGEST_BYTE):
        total_J += np.add.reduce(is_above_IJ[start : start + LARGEST_BYTE].view(np.uint8), axis=0, dtype=np.uint8)
    return total_J


def _compare_on_gpu(near_IJ: Tensor, upper: NDArray[Any], lower: NDArray[Any], axis: int) -> Entries:
    """Copy the counts, and only the few entries found: the CPU waits once for their number and then for three copies."""
    bounds = torch.from_numpy(np.stack([upper, lower])).to(near_IJ.device)
    above_IJ, between_IJ = (near_IJ >= bounds[0].unsqueeze(1 - axis)), (near_IJ >= bounds[1].unsqueeze(1 - axis))
    flat_E = (between_IJ ^ above_IJ).view(-1).nonzero().squeeze(1)
    num_above, flat, near = (part.cpu().numpy() for part in (above_IJ.sum(dim=1 - axis), flat_E, near_IJ.view(-1)[flat_E]))
    return Entries(num_above, *np.divmod(flat, near_IJ.shape[1]), near)
