"""Embeddings and labels as the evaluator takes them: checked once, in one place.

Shapes: N samples, D embedding dimensions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dml_core.errors import EvaluationError

NUM_ROWS_SHOWN = 5
LARGEST_SQUARED_NORM = 1e37  # squared distances, up to four times as large, must fit in float32


class EmbeddingShard(NamedTuple):
    """A part of a set of embeddings that stays where it is until it is needed.

    Attributes:
        load: gives the (n, D) embeddings; called each time that the shard is needed, and only one result is kept.
        labels: (n,), which are in memory for all shards.
    """

    load: Callable[[], ArrayLike]
    labels: ArrayLike


def checked_embeddings(embeddings: ArrayLike, name: str = "embeddings") -> NDArray[Any]:
    """`embeddings` as an (N, D) array of floats, N and D at least 1.

    Raises:
        EvaluationError: another shape or type, or rows with NaN, infinity or values too large to be squared in float32.
    """
    values_ND = np.asarray(embeddings)
    if values_ND.ndim != 2 or 0 in values_ND.shape:
        raise EvaluationError(f"{name}: expected an array of shape (samples, dimensions), found shape {values_ND.shape}")
    if values_ND.dtype.kind != "f":
        raise EvaluationError(f"{name}: expected floating-point numbers, found {values_ND.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        squares_N = np.einsum("nd,nd->n", values_ND, values_ND, dtype=np.float32, casting="same_kind")
    refuse_rows(~(squares_N < LARGEST_SQUARED_NORM), f"{name}: NaN, infinite or huge values", "find out what the network did there")
    return values_ND


def checked_labels(labels: ArrayLike, num_samples: int | None = None, name: str = "labels") -> NDArray[Any]:
    """`labels` as an array (N,) of integers or strings.

    Raises:
        EvaluationError: another shape or type, or not one label for each of the `num_samples` samples, where that is given.
    """
    values_N = np.asarray(labels)
    if values_N.dtype == object:
        values_N = np.asarray(values_N.tolist())
    if values_N.ndim != 1 or values_N.dtype.kind not in "iuUS":
        raise EvaluationError(f"{name}: expected one integer or string per sample, found {values_N.dtype} of shape {values_N.shape}")
    if num_samples is not None and len(values_N) != num_samples:
        raise EvaluationError(f"{name}: {len(values_N)} labels for {num_samples} embeddings; one is needed for each")
    return values_N


def label_codes(arrays: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], list[NDArray[np.int64]]]:
    """The distinct labels of several arrays, ascending, and each array as indices into them.

    Raises:
        EvaluationError: some labels are integers and others strings.
    """
    kinds = {array.dtype.kind for array in arrays}
    if len(kinds & set("iu")) and len(kinds & set("US")):
        raise EvaluationError("some labels are integers and others strings (gallery and queries?); give all the same type")
    names, codes = np.unique(np.concatenate(arrays), return_inverse=True)
    return names, np.split(codes.astype(np.int64), np.cumsum([len(array) for array in arrays])[:-1])


def refuse_rows(bad_N: NDArray[np.bool_], problem: str, advice: str) -> None:
    """Raise an EvaluationError that names the first bad rows, if there are any."""
    rows = np.flatnonzero(bad_N)
    if len(rows):
        shown = ", ".join(map(str, rows[:NUM_ROWS_SHOWN])) + (", ..." if len(rows) > NUM_ROWS_SHOWN else "")
        raise EvaluationError(f"{problem} in {len(rows)} of {len(bad_N)} rows ({shown}); {advice}")
