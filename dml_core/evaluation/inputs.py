"""Validation of the evaluator's embeddings and labels.

Shapes: N samples, D embedding dimensions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dml_core.errors import EvaluationError, first_line

NUM_ROWS_SHOWN = 5
LARGEST_SQUARED_NORM = 1e37  # squared distances, up to four times as large, must fit in float32
INT64 = np.iinfo(np.int64)
KINDS = {"i": "integers", "u": "integers", "U": "strings", "S": "bytes"}


class EmbeddingShard(NamedTuple):
    """A part of a set of embeddings, loaded only when needed.

    Attributes:
        load: returns the (n, D) embeddings; called each time the shard is needed, and only one result is kept.
        labels: (n,), in memory for all shards.
    """

    load: Callable[[], ArrayLike]
    labels: ArrayLike


def checked_embeddings(embeddings: ArrayLike, name: str = "embeddings") -> NDArray[Any]:
    """Return `embeddings` as an (N, D) array of floats, N and D at least 1; torch tensors may be on any device.

    Raises:
        EvaluationError: wrong shape or type, or rows with NaN, infinity or values too large to be squared in float32.
    """
    values_ND = _as_array(embeddings, name)
    if values_ND.ndim != 2 or 0 in values_ND.shape:
        raise EvaluationError(f"{name}: expected an array of shape (samples, dimensions), found shape {values_ND.shape}")
    if values_ND.dtype.kind != "f":
        raise EvaluationError(f"{name}: expected floating-point numbers, found {values_ND.dtype}")
    if values_ND.itemsize > 8:
        values_ND = values_ND.astype(np.float64)  # numpy does not sum longdouble as float64
    with np.errstate(over="ignore", invalid="ignore"):
        squares_N = np.einsum("nd,nd->n", values_ND, values_ND, dtype=np.float32, casting="same_kind")
    refuse_rows(~(squares_N < LARGEST_SQUARED_NORM), f"{name}: NaN, infinite or huge values", "find out what the network did there")
    return values_ND


def checked_labels(labels: ArrayLike, num_samples: int | None = None, name: str = "labels") -> NDArray[Any]:
    """Return `labels` as an array (N,) of integers or of strings.

    Raises:
        EvaluationError: wrong shape or type, integers and strings in one array, integers beyond 64 bits, or not one label for each of the
            `num_samples` samples, if given.
    """
    values_N = _as_array(labels, name)
    if values_N.ndim != 1:
        raise EvaluationError(f"{name}: expected one integer or string per sample, found shape {values_N.shape}")
    if values_N.dtype == object or not hasattr(labels, "dtype"):  # numpy turns [1, "1"] into two equal strings, [2**63, -1] into floats
        values_N = _of_one_kind(labels if isinstance(labels, Sequence) else values_N.tolist(), name)
    if values_N.dtype.kind not in "iuUS":
        raise EvaluationError(f"{name}: expected one integer or string per sample, found {values_N.dtype} of shape {values_N.shape}")
    if num_samples is not None and len(values_N) != num_samples:
        raise EvaluationError(f"{name}: {len(values_N)} labels for {num_samples} embeddings; one is needed for each")
    return values_N


def label_codes(arrays: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], list[NDArray[np.int64]]]:
    """Return the distinct labels of several arrays, ascending, and each array as indices into them.

    Raises:
        EvaluationError: the arrays' labels have different types: integers, strings or bytes.
    """
    if len({KINDS.get(array.dtype.kind) for array in arrays}) > 1:
        raise EvaluationError("some labels are integers and others strings (gallery and queries?); give all the same type")
    if np.result_type(*arrays).kind == "f":  # uint64 with int64: float64 would merge integers beyond 2^53
        arrays = [array.astype(object) for array in arrays]
    names, codes = np.unique(np.concatenate(arrays), return_inverse=True)
    return names, np.split(codes.astype(np.int64), np.cumsum([len(array) for array in arrays])[:-1])


def shard_codes(
    gallery: Sequence[EmbeddingShard], queries: Sequence[EmbeddingShard] | None
) -> tuple[NDArray[Any], list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Return the distinct labels, ascending, and as indices into them those of each gallery shard and of each query shard.

    Without `queries` the gallery's items are the queries.

    Raises:
        EvaluationError: as in `checked_labels` and `label_codes`; or the shards are no list of them, or none.
    """
    for name, shards in (("gallery", gallery), ("queries", [] if queries is None else queries)):
        is_list = isinstance(shards, Sequence) and not isinstance(shards, EmbeddingShard)
        if not is_list or not all(isinstance(shard, EmbeddingShard) and callable(shard.load) for shard in shards):
            raise EvaluationError(f"{name}: expected a list of EmbeddingShard(load, labels), whose `load` is a function")
    if not gallery or (queries is not None and not queries):
        raise EvaluationError("the gallery or the queries have no shard; give one at least")
    labels = [checked_labels(shard.labels) for shard in [*gallery, *(queries or ())]]
    if not all(map(len, labels)):
        raise EvaluationError("a shard of the gallery or of the queries has no sample; leave it out")
    names, codes = label_codes(labels)
    return names, codes[: len(gallery)], codes if queries is None else codes[len(gallery) :]


def _as_array(values: ArrayLike, name: str) -> NDArray[Any]:
    """Return a list, an array or a torch tensor as a numpy array, without importing torch."""
    try:
        if hasattr(values, "detach"):
            tensor: Any = values.detach().cpu().resolve_conj().resolve_neg()
            values = tensor.float() if tensor.is_floating_point() and tensor.element_size() <= 2 else tensor  # numpy has no bfloat16
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise EvaluationError(f"{name}: no array of numbers or strings ({first_line(error)[:80]})") from None
    if np.ma.is_masked(values):
        raise EvaluationError(f"{name}: a masked array with masked values; leave those samples out")
    return array


def _of_one_kind(items: Sequence[Any], name: str) -> NDArray[Any]:
    """Return a list of only integers, only strings or only bytes as an array."""
    are_integers = all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in items)
    if not are_integers and not any(all(isinstance(item, kind) for item in items) for kind in (str, bytes)):
        kinds = ", ".join(sorted({type(item).__name__ for item in items})[:3])
        raise EvaluationError(f"{name}: expected one integer or string per sample, all of one type, found {kinds}")
    if not are_integers and any(item[-1:] in ("\0", b"\0") for item in items):
        raise EvaluationError(f"{name}: a label ends in a NUL character, which numpy drops; rename it")
    if are_integers and items:
        low, high = min(items), max(items)
        if low < INT64.min or high > np.iinfo(np.uint64).max or (low < 0 and high > INT64.max):
            raise EvaluationError(f"{name}: integers from {low:.3g} to {high:.3g} fit in no 64 bits; number the classes")
    return np.array(items)


def refuse_rows(bad_N: NDArray[np.bool_], problem: str, advice: str) -> None:
    """Raise an EvaluationError that names the first bad rows, if there are any."""
    rows = np.flatnonzero(bad_N)
    if len(rows):
        shown = ", ".join(map(str, rows[:NUM_ROWS_SHOWN])) + (", ..." if len(rows) > NUM_ROWS_SHOWN else "")
        raise EvaluationError(f"{problem} in {len(rows)} of {len(bad_N)} rows ({shown}); {advice}")
