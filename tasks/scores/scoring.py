"""Score embeddings from files, outside any run (`dml evaluate`).

Embeddings are a `.npy` file with another one of labels, a folder written by the extraction or `dml embed` (`tasks.runs.embeddings`), or a
single file written by `dml embed` (`.npz`, `.parquet`).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dml_core.config import parse, refuse_repeats
from dml_core.errors import ConfigError, EvaluationError, StoreError, first_line
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import EmbeddingShard, evaluate, evaluate_shards
from dml_core.evaluation.retrieval.approximate import READ_BY_INDEX, ApproximateConfig, evaluate_approximately
from tasks.runs.embeddings import BAD_ARRAY, MANIFEST_FILE, RoleEntry, open_embedded, query_and_gallery, read_manifest

MOST_DIGITS = 18  # of a number of 64 bits
INDEXES = {"ivf": "ivf_flat", "pq": "ivf_pq", "hnsw": "hnsw"}


class Files(NamedTuple):
    """A gallery and optional queries: two files each, or one folder or file (then only `embeddings` is given)."""

    embeddings: Path
    labels: Path | None
    query_embeddings: Path | None
    query_labels: Path | None


def score_files(files: Files, config: EvaluationConfig, stream: bool, approximation: ApproximateConfig | None) -> dict[str, float | int]:
    """Return metrics of the embeddings in `files`.

    Args:
        stream: keep only one shard of the gallery and one of the queries in memory; computes only the retrieval metrics.
        approximation: index to search, also shard by shard; computes only Recall@K and the index's recall. None: exact search.

    Raises:
        EvaluationError: files are missing or do not fit each other, or the embeddings cannot be scored.
    """
    if not files.embeddings.exists():
        raise EvaluationError(f"{files.embeddings}: no such file or folder")
    gallery, queries = _open_folder(files) if files.embeddings.is_dir() else _open_arrays(files)
    if approximation is not None:
        return evaluate_approximately(gallery, config, approximation, queries)
    if stream:
        return evaluate_shards(gallery, config, queries)
    return evaluate(*_joined(gallery), config, *((None, None) if queries is None else _joined(queries)))


def approximation_of(index: str, options: Sequence[str]) -> ApproximateConfig:
    """Parse the short name of an index and options as `key=value`.

    Raises:
        ConfigError: the index or an option is unknown, or an option is repeated or not read by this index.
    """
    if index not in INDEXES:
        raise ConfigError(f"--approximate {index}: expected one of {', '.join(INDEXES)}")
    for option in options:
        if not is_number(option.partition("=")[2]):
            raise ConfigError(f"--index-option {option[:100]}: expected name=number, as in num_probes=64")
    pairs = [(name, int(value)) for name, _, value in (option.partition("=") for option in options)]
    refuse_repeats("--index-option", (name for name, _ in pairs))
    approximation = parse(ApproximateConfig, {"index": INDEXES[index], **dict(pairs)}, "--index-option")
    read = READ_BY_INDEX[approximation.index]
    for name, _ in pairs:
        if name not in read:
            raise ConfigError(f"--index-option {name}: index '{index}' does not read it; it reads {', '.join(sorted(read))}")
    return approximation


def is_number(text: str) -> bool:
    """Return whether a text is a whole number that fits in 64 bits."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


def _open_arrays(files: Files) -> tuple[list[EmbeddingShard], list[EmbeddingShard] | None]:
    if files.embeddings.suffix in (".npz", ".parquet"):
        return _open_embedded(files), None
    if files.labels is None:
        raise EvaluationError(
            f"{files.embeddings}: a file of embeddings needs --labels; only the output of `dml embed` or of a run has its own"
        )
    if (files.query_embeddings is None) != (files.query_labels is None):
        raise EvaluationError("--query-embeddings and --query-labels go together; give both or neither")
    gallery = [EmbeddingShard(partial(load_array, files.embeddings), load_array(files.labels))]
    if files.query_embeddings is None or files.query_labels is None:
        return gallery, None
    return gallery, [EmbeddingShard(partial(load_array, files.query_embeddings), load_array(files.query_labels))]


def _open_embedded(files: Files) -> list[EmbeddingShard]:
    """Open a file of embeddings and classes written by `dml embed`; each row group of a Parquet file is a shard."""
    path = files.embeddings
    if any(other is not None for other in files[1:]):
        raise EvaluationError(f"{path}: has its own labels and no queries; leave --labels and --query-... out")
    parts = open_embedded(path)
    if any(part.labels is None for part in parts):
        raise EvaluationError(f"{path}: not embeddings with classes as `dml embed` writes them; embed images with classes")
    if not any(part.labels for part in parts):
        raise EvaluationError(f"{path}: no embeddings")
    return [EmbeddingShard(part.load, np.array(part.labels)) for part in parts]


def _open_folder(files: Files) -> tuple[list[EmbeddingShard], list[EmbeddingShard] | None]:
    if any(path is not None for path in files[1:]):
        raise EvaluationError(f"{files.embeddings}: a folder has its own labels and queries; leave --labels and --query-... out")
    manifest = files.embeddings / MANIFEST_FILE
    if not manifest.exists():
        raise EvaluationError(f"{files.embeddings}: no {MANIFEST_FILE} there; expected a folder that extraction has written")
    try:
        roles = query_and_gallery(files.embeddings)
        query, gallery = (read_manifest(files.embeddings)[role] for role in roles)
    except (StoreError, KeyError):
        raise EvaluationError(f"{manifest}: not the manifest of extracted embeddings; extract them again") from None
    return _role_shards(files.embeddings, gallery), None if len(set(roles)) == 1 else _role_shards(files.embeddings, query)


def _role_shards(folder: Path, entry: RoleEntry) -> list[EmbeddingShard]:
    """Return the shards of a role; their sizes are read from the file headers."""
    if entry.labels is None:
        raise EvaluationError(
            f"{folder}: the images were embedded without classes, and nothing can be scored without; embed a list with labels"
        )
    labels_N = load_array(folder / entry.labels)
    sizes = [len(load_array(folder / name, memory_mapped=True)) for name in entry.shards]
    if sum(sizes) != len(labels_N):
        raise EvaluationError(f"{folder}: {sum(sizes)} embeddings but {len(labels_N)} labels; extract them again")
    parts = np.split(labels_N, np.cumsum(sizes)[:-1])
    return [EmbeddingShard(partial(load_array, folder / name), part) for name, part in zip(entry.shards, parts, strict=True)]


def _joined(shards: Sequence[EmbeddingShard]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([np.asarray(shard.load()) for shard in shards]), np.concatenate([np.asarray(shard.labels) for shard in shards])


def load_array(path: Path, memory_mapped: bool = False) -> np.ndarray:
    """Load an array from a `.npy` file without executing its content. If memory-mapped, only accessed parts are read.

    Raises:
        EvaluationError: the file does not exist, or is not a plain array of rows or of labels.
    """
    try:
        array = np.load(path, "r" if memory_mapped else None, allow_pickle=False)
    except FileNotFoundError:
        raise EvaluationError(f"{path}: no such file; expected an array saved by numpy.save") from None
    except BAD_ARRAY as error:
        reason = first_line(error)  # numpy advises to load Python objects, which would execute code
        why = "it holds Python objects, or is no .npy file" if "pickle" in reason else reason
        raise EvaluationError(f"{path}: not an array of numbers or strings saved by numpy.save ({why})") from None
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise EvaluationError(f"{path}: a single number, or an archive of arrays (.npz); expected an array saved by numpy.save")
    return np.asarray(array)
