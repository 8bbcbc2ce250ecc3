"""Files of embeddings: a run's (`tasks.workers.embedding`) and those of `dml embed` (`tasks.models.embed`).

A folder has shards (`ROLE-00000-of-00016.npy`, each (n, D) float32), `ROLE-labels.npy` and, written last, `manifest.json`. `dml embed` adds
`plan.json` (the network) and `items.parquet` (path and label of each row), or makes one file of a folder: `.npz` or `.parquet`.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from pydantic import TypeAdapter, ValidationError

from dml_core.errors import EvaluationError, StoreError
from dml_core.files import check_regular, read_regular, write_errors, writing
from tasks.files import write_whole
from tasks.runs.records import Record, changed_file
from tasks.sealed import read_bytes

MANIFEST_FILE = "manifest.json"
PLAN_FILE, ITEMS_FILE = "plan.json", "items.parquet"
IMAGES_ROLE = "images"  # the only role of `dml embed`
KEPT_EPOCH_FILE = "kept_epoch.json"
BAD_ARRAY = (OSError, ValueError, EOFError, SyntaxError, TokenError, BadZipFile)  # raised by numpy.load for damaged files
NUM_ROWS_AT_ONCE = 8192
KEPT_EPOCH = "kept_epoch"  # name of the score: number of epochs after which the weights were reached


class RoleEntry(Record):
    """One role in the manifest: number of rows, and file names; `dml embed` writes no labels for images without classes."""

    rows: int
    dimensions: int
    shards: tuple[str, ...]
    labels: str | None = None


_MANIFEST = TypeAdapter(dict[str, RoleEntry])
_KEPT_EPOCH = TypeAdapter(dict[str, float])


def read_manifest(folder: Path) -> dict[str, RoleEntry]:
    """Return role -> entry of a folder of extracted embeddings with classes.

    Raises:
        StoreError: the manifest is missing or damaged.
    """
    path = folder / MANIFEST_FILE
    try:
        entries = _MANIFEST.validate_json(read_bytes(path) or b"")
    except ValidationError:
        entries = {}
    if not entries:
        raise changed_file(path)
    return entries


def load_embeddings(folder: Path, role: str) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings (N, D) float32 and labels (N,) int64 of a role, in dataset order.

    Raises:
        StoreError: a file is missing or damaged.
    """
    entry = read_manifest(folder).get(role)
    if entry is None or entry.labels is None:
        raise StoreError(f"{folder}: no embeddings of {role} with labels there; extract them again")
    rows_ND, labels_N = np.concatenate([_load(folder / name) for name in entry.shards]), _load(folder / entry.labels)
    if rows_ND.shape != (entry.rows, entry.dimensions) or len(labels_N) != entry.rows:
        raise changed_file(folder / MANIFEST_FILE)
    return rows_ND, labels_N


def shard_ranges(role: str, num_rows: int, shard_rows: int) -> dict[str, range]:
    """Return the file name and the rows of each shard of a role."""
    starts = range(0, num_rows, shard_rows)
    return {
        f"{role}-{number:05d}-of-{len(starts):05d}.npy": range(start, min(start + shard_rows, num_rows))
        for number, start in enumerate(starts)
    }


def save_array(path: Path, array: np.ndarray) -> None:
    """Write a shard or labels; the file is complete or absent."""
    with writing(path) as file:
        np.save(file, array)


def save_manifest(folder: Path, entries: Mapping[str, RoleEntry]) -> None:
    """Write the manifest, which makes the folder readable."""
    roles = {role: entry.model_dump(mode="json", exclude_none=True) for role, entry in entries.items()}
    write_whole(folder / MANIFEST_FILE, json.dumps(roles, indent=1))


def query_and_gallery(embeddings: Path) -> tuple[str, str]:
    """Return the roles of queries and gallery; without a query role, the first role twice."""
    roles = list(read_manifest(embeddings))
    return ("query", "gallery") if "query" in roles else (roles[0], roles[0])


def save_kept_epoch(folder: Path, num_epochs: int) -> None:
    """Write the number of epochs after which the embedding weights were reached, if they are not the last epoch's.

    Raises:
        StoreError: the folder cannot be written.
    """
    with write_errors(f"{folder}: embeddings", "free or change the store"):
        write_whole(folder / KEPT_EPOCH_FILE, json.dumps({KEPT_EPOCH: num_epochs}) + "\n")


def kept_epoch(folder: Path) -> dict[str, float]:
    """Return what `save_kept_epoch` wrote, as a score of the run; empty for embeddings of the last epoch.

    Raises:
        StoreError: the file is damaged.
    """
    path = folder / KEPT_EPOCH_FILE
    data = read_bytes(path)
    try:
        return {} if data is None else {KEPT_EPOCH: _KEPT_EPOCH.validate_json(data)[KEPT_EPOCH]}
    except (ValidationError, KeyError):
        raise changed_file(path) from None


def _load(path: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except BAD_ARRAY:
        raise changed_file(path) from None


# ---------------------------------------------------------------- `dml embed`


class Part(NamedTuple):
    """Some thousand rows of embeddings: `load` reads them, (n, D) float32; names and labels are None if they are not stored."""

    load: Callable[[], np.ndarray]
    names: Sequence[str] | None
    labels: Sequence[str | None] | None


class EmbeddedBy(NamedTuple):
    """The network of `dml embed`'s output: its identity, empty if not stored, its metric, and the hash of its weights, if known."""

    model_identity: str = ""
    metric: str = "cosine"
    weights_sha256: str | None = None


def recorded_network(path: Path) -> EmbeddedBy:
    """Return the network of `dml embed`'s output (a folder, `.npz` or `.parquet`); the defaults if `path` records none.

    Raises:
        EvaluationError: the file is damaged.
    """
    stored: dict[str, Any] = {}
    with _readable(path):
        if (path / PLAN_FILE).is_file():
            stored = json.loads(read_regular(path / PLAN_FILE))
            stored["model_identity"] = stored["model"]
        elif path.suffix == ".npz" and path.exists():
            check_regular(path)
            with np.load(path, allow_pickle=False) as file:
                stored = {name: str(file[name]) for name in EmbeddedBy._fields if name in file}
        elif path.suffix == ".parquet" and path.exists():
            from pyarrow import parquet

            stored = {name.decode(): value.decode() for name, value in (parquet.read_schema(path).metadata or {}).items()}
    return EmbeddedBy(**{name: stored[name] for name in EmbeddedBy._fields if name in stored})


def open_embedded(path: Path) -> list[Part]:
    """Return the rows of what `dml embed` wrote: a folder, a `.npz` or a `.parquet`, of which a shard or row group at a time is read.

    Raises:
        EvaluationError: a file is missing, damaged, or not written by `dml embed`; `Part.load` raises it too.
    """
    with _readable(path):
        return (_open_folder if path.is_dir() else _open_npz if path.suffix == ".npz" else _open_parquet)(path)


def _open_folder(folder: Path) -> list[Part]:
    from pyarrow import parquet

    entry = json.loads(read_regular(folder / MANIFEST_FILE))[IMAGES_ROLE]
    items = parquet.read_table(folder / ITEMS_FILE)
    parts, start = [], 0
    for name in entry["shards"]:
        rows = np.load(folder / name, "r", allow_pickle=False)  # memory-mapped: read when it is used
        columns = items.slice(start, len(rows)).to_pydict()
        parts.append(Part(partial(np.asarray, rows), columns["path"], columns.get("label")))
        start += len(rows)
    if start != len(items):
        raise ValueError(f"{start} embeddings and {len(items)} names")
    return parts


def _open_npz(path: Path) -> list[Part]:
    check_regular(path)
    with np.load(path, allow_pickle=False) as file:
        embeddings, columns = file["embeddings"], {name: file[name].tolist() for name in ("names", "labels") if name in file}
    if any(len(column) != len(embeddings) for column in columns.values()):
        raise ValueError(" and ".join(f"{len(column)} {name}" for name, column in {"embeddings": embeddings, **columns}.items()))
    rows = [slice(start, start + NUM_ROWS_AT_ONCE) for start in range(0, len(embeddings), NUM_ROWS_AT_ONCE)]
    names, labels = columns.get("names"), columns.get("labels")
    return [Part(partial(embeddings.__getitem__, part), names and names[part], labels and labels[part]) for part in rows]


def _open_parquet(path: Path) -> list[Part]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    parts = []
    for number in range(file.num_row_groups):
        columns = file.read_row_group(number, [name for name in ("name", "label") if name in file.schema_arrow.names]).to_pydict()
        parts.append(Part(partial(_load_row_group, path, file, number), columns.get("name"), columns.get("label")))
    return parts


def _load_row_group(path: Path, file: Any, number: int) -> np.ndarray:
    import pyarrow.compute as pc

    with _readable(path):
        column = file.read_row_group(number, ["embedding"])["embedding"].combine_chunks()
        if column.null_count or len(pc.unique(pc.list_value_length(column))) > 1:
            raise ValueError("rows without an embedding, or of different sizes")
        return np.asarray(column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, *BAD_ARRAY, zlib.error, LookupError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise EvaluationError(f"{path}: cannot be read ({reason}); expected the complete output of `dml embed`") from None


def _save_npz(folder: Path, file: IO[bytes]) -> None:
    """Write the rows of a folder of `dml embed` as one `.npz`."""
    parts = open_embedded(folder)
    columns = {
        "embeddings": np.concatenate([part.load() for part in parts]),
        "names": np.array([*chain.from_iterable(part.names or () for part in parts)]),
        **{name: np.array(value) for name, value in _stored_network(folder).items()},
    }
    if parts[0].labels is not None:
        columns["labels"] = np.array([*chain.from_iterable(part.labels or () for part in parts)])
    np.savez(file, **columns)  # type: ignore[arg-type]


def _save_parquet(folder: Path, file: IO[bytes]) -> None:
    """Write the rows of a folder of `dml embed` as one Parquet file, with a row group per shard."""
    import pyarrow as pa
    from pyarrow import parquet

    parts = open_embedded(folder)
    num_dimensions = parts[0].load().shape[1]
    fields = [("name", pa.string()), ("label", pa.string()), ("embedding", pa.list_(pa.float32(), num_dimensions))]
    schema = pa.schema([field for field in fields if parts[0].labels is not None or field[0] != "label"], _stored_network(folder))
    with parquet.ParquetWriter(file, schema) as writer:
        for part in parts:
            if part.names:  # else all images of the shard were bad
                embeddings = pa.FixedSizeListArray.from_arrays(pa.array(part.load().ravel()), num_dimensions)
                columns = {"name": part.names, "label": part.labels, "embedding": embeddings}
                writer.write_table(pa.table({name: columns[name] for name in schema.names}, schema))


def _stored_network(folder: Path) -> dict[str, str]:
    """Return what one file stores about the network of a folder."""
    return {name: value for name, value in recorded_network(folder)._asdict().items() if value is not None}


SINGLE_FILES = {".npz": _save_npz, ".parquet": _save_parquet}  # suffix -> what makes one file of a folder
