"""Embeddings and labels as the evaluator takes them: checked once, in one place.

Shapes: N samples, D embedding dimensions.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dml_core.errors import EvaluationError

NUM_ROWS_SHOWN = 5


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
    refuse_rows(~np.isfinite(squares_N), f"{name}: NaN, infinite or huge values", "find out what the network did there")
    return values_ND


def checked_labels(labels: ArrayLike, num_samples: int, name: str = "labels") -> NDArray[Any]:
    """`labels` as an (N,) array of integers or strings.

    Raises:
        EvaluationError: another shape or type, or not one label for each of the `num_samples` samples.
    """
    values_N = np.asarray(labels)
    if values_N.dtype == object:
        values_N = np.asarray(values_N.tolist())
    if values_N.ndim != 1 or values_N.dtype.kind not in "iuUS":
        raise EvaluationError(f"{name}: expected one integer or string per sample, found {values_N.dtype} of shape {values_N.shape}")
    if len(values_N) != num_samples:
        raise EvaluationError(f"{name}: {len(values_N)} labels for {num_samples} embeddings; one is needed for each")
    return values_N


def label_codes(labels_N: NDArray[Any], query_labels_Q: NDArray[Any] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels as indices into their sorted union: of the gallery (N,) and of the queries (Q,), the gallery itself where there are none.

    Raises:
        EvaluationError: the one has integers and the other strings.
    """
    if query_labels_Q is None:
        codes_N = np.unique(labels_N, return_inverse=True)[1]
        return codes_N, codes_N
    if (labels_N.dtype.kind in "iu") != (query_labels_Q.dtype.kind in "iu"):
        raise EvaluationError(f"labels are {labels_N.dtype} but query labels are {query_labels_Q.dtype}; give both the same type")
    codes = np.unique(np.concatenate([labels_N, query_labels_Q]), return_inverse=True)[1]
    return codes[: len(labels_N)], codes[len(labels_N) :]


def refuse_rows(bad_N: NDArray[np.bool_], problem: str, advice: str) -> None:
    """Raise an EvaluationError that names the first bad rows, if there are any."""
    rows = np.flatnonzero(bad_N)
    if len(rows):
        shown = ", ".join(map(str, rows[:NUM_ROWS_SHOWN])) + (", ..." if len(rows) > NUM_ROWS_SHOWN else "")
        raise EvaluationError(f"{problem} in {len(rows)} of {len(bad_N)} rows ({shown}); {advice}")
