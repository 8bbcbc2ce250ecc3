"""Building and changing an index. An interruption leaves the index unchanged (see `layout.py`).

A change rewrites the vectors and items: a few seconds for a million. Adding extends an approximate index's lists or graph; removing refills
them, because positions change, and for a graph this is as slow as building it.

Shapes: N items, D dimensions, S sampled items, k neighbours.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import faiss
import numpy as np
from numpy.typing import NDArray

from dml_core.errors import ConfigError, EvaluationError
from dml_core.evaluation.config import Metric
from dml_core.evaluation.inputs import EmbeddingShard, checked_embeddings
from dml_core.evaluation.retrieval.approximate import ApproximateConfig, build, index_recall, search_others
from dml_core.evaluation.retrieval.geometry import as_points, blocks, centred
from dml_core.index.choosing import choose
from dml_core.index.index import Index, read_approximate
from dml_core.index.items import Item, ItemWriter, writing_items
from dml_core.index.layout import FILE_PATTERNS, INFO_FILE, LOCK_FILE, Found, IndexInfo, changing, commit, discard, read_info

RECALL_AT = (1, 10, 100)
SEED = 0
NUM_ROWS_AT_ONCE = 65_536
NUM_NAMES_SHOWN = 3
LEAST_COMPRESSED = 256  # a byte encodes this many parts of vectors


class Batch(NamedTuple):
    """Some items with their embeddings, (n, D)."""

    embeddings: NDArray[Any]
    items: Sequence[Item]


def build_index(
    folder: Path,
    batches: Iterable[Batch],
    model_identity: str,
    metric: Metric = "cosine",
    approximate: str | None = None,
    model_source: str | None = None,
    replace: bool = False,
) -> Index:
    """Build an index.

    Args:
        folder: folder of the index; created if missing.
        batches: the items; one batch at a time is in memory.
        model_identity: identity of the embeddings' network.
        metric: metric of the search.
        approximate: "ivf", "pq", "hnsw", "auto" (by size); None searches exactly.
        model_source: display name of the model.
        replace: replace an existing index.

    Raises:
        ConfigError: an index or other files exist already, there are no items, names repeat, or sizes do not fit.
        EvaluationError: embeddings cannot be compared, or are too few for the approximate index.
        StoreError: the folder cannot be written.
    """
    with changing(folder):
        _check_place(folder, replace)
        with _new_version(folder) as version:
            names = _Names(folder)
            vectors, items_path = folder / f"vectors-{version}.f32", folder / f"items-{version}.arrow"
            with vectors.open("wb") as file, writing_items(items_path) as items:
                num_items, num_dimensions = _write(batches, metric, None, names, file.write, items)
            if num_dimensions is None:
                raise ConfigError(f"{folder}: nothing to index; name a folder, a list or embeddings with one image at least")
            kind, approximation, reason = choose(approximate, num_items, num_dimensions)
            info = IndexInfo(
                model_identity=model_identity,
                model_source=model_source,
                metric=metric,
                num_items=num_items,
                num_dimensions=num_dimensions,
                kind=kind,
                reason=reason,
                approximation=approximation,
                version=version,
            )
            if approximation is not None:
                _save(_build_approximate(_rows(info, folder), metric, approximation), info.approximate(folder))
            return _finish(folder, info)


def add_items(folder: Path, batches: Iterable[Batch], model_identity: str) -> Index:
    """Add items to an index.

    Raises:
        ConfigError: no index there, embeddings of another model, or a name that the index already has.
        EvaluationError: embeddings cannot be compared.
        StoreError: the folder cannot be read or written.
    """
    read_info(folder)
    with changing(folder):
        old = Index.open(folder)
        old.check_model(model_identity)
        with _new_version(folder) as version:
            names = _Names(folder, old.items.names())
            info = old.info.model_copy(update={"version": version})
            with info.vectors(folder).open("wb") as file, writing_items(info.items(folder)) as items:
                for rows in blocks(old.num_items, NUM_ROWS_AT_ONCE):
                    file.write(old.vectors_ND[rows].data)
                items.copy(old.items.batches())
                num_added, _ = _write(batches, old.metric, old.num_dimensions, names, file.write, items)
            if num_added == 0:
                raise ConfigError(f"{folder}: nothing to add; name a folder, a list or embeddings with one image at least")
            info = info.model_copy(update={"num_items": old.num_items + num_added})
            if info.kind != "exact":
                index = read_approximate(old.info.approximate(folder), mapped=False)
                _fill(index, _rows(info, folder)[old.num_items :])
                _save(index, info.approximate(folder))
            return _finish(folder, info)


def remove_items(folder: Path, names: Sequence[str]) -> Index:
    """Remove items by name; if a name is unknown, remove none.

    Raises:
        ConfigError: no index there, a name is unknown, or no item would remain.
        StoreError: the folder cannot be read or written.
    """
    read_info(folder)
    with changing(folder):
        old = Index.open(folder)
        found = old.items.names()
        unwanted = set(names)
        unknown = sorted(unwanted.difference(found))
        if unknown:
            raise ConfigError(f"{folder}: has no item named {_shown(unknown)}; nothing was removed")
        kept_N = np.array([name not in unwanted for name in found])
        if not kept_N.any():
            raise ConfigError(f"{folder}: nothing would be left of the index; delete the folder instead")
        with _new_version(folder) as version:
            info = old.info.model_copy(update={"version": version, "num_items": int(kept_N.sum())})
            with info.vectors(folder).open("wb") as file, writing_items(info.items(folder)) as items:
                for rows in blocks(old.num_items, NUM_ROWS_AT_ONCE):
                    file.write(old.vectors_ND[rows][kept_N[rows]].data)
                items.copy(old.items.batches(kept_N))
            if info.kind != "exact":
                index = read_approximate(old.info.approximate(folder), mapped=False)
                index.reset()
                _fill(index, _rows(info, folder))
                _save(index, info.approximate(folder))
            return _finish(folder, info)


# ---------------------------------------------------------------- the files


def _check_place(folder: Path, replace: bool) -> None:
    """Reject a folder that has an index, unless it is to be replaced, or any other file."""
    if (folder / INFO_FILE).exists() and not replace:
        raise ConfigError(f"{folder}: has an index already; add to it with `dml index add`, or replace it with --force")
    ours = {INFO_FILE, LOCK_FILE, *(path.name for pattern in FILE_PATTERNS for path in folder.glob(pattern))}
    strange = next((path for path in sorted(folder.iterdir()) if path.name not in ours), None)
    if strange is not None:
        raise ConfigError(f"{folder}: not empty ({strange.name}); name a folder of its own for the index")


@contextmanager
def _new_version(folder: Path) -> Iterator[str]:
    """Yield a version for new files, which are removed if they do not become the index."""
    version = uuid4().hex[:12]
    try:
        yield version
    except BaseException:
        discard(folder, version)
        raise


class _Names:
    """Ensures that names are unique."""

    def __init__(self, folder: Path, known: Sequence[str] = ()) -> None:
        self._folder = folder
        self._known = set(known)
        self._had = frozenset(self._known)

    def add(self, items: Sequence[Item]) -> None:
        for item in items:
            if item.name in self._had:
                raise ConfigError(
                    f"{self._folder}: has an item named {item.name} already; remove it first with `dml index remove`, or leave it out"
                )
            if item.name in self._known:
                raise ConfigError(f"two images are named {item.name}; an index finds each by a name of its own")
            self._known.add(item.name)


def _write(
    batches: Iterable[Batch],
    metric: Metric,
    num_dimensions: int | None,
    names: _Names,
    write: Callable[[Any], Any],
    items: ItemWriter,
) -> tuple[int, int | None]:
    """Write batches as they arrive; return the numbers of items and dimensions."""
    num_items = 0
    for batch in batches:
        if not len(batch.items):
            continue
        if len(batch.items) != len(batch.embeddings):
            raise EvaluationError(f"{len(batch.embeddings)} embeddings for {len(batch.items)} images; one is needed for each")
        points = as_points(checked_embeddings(batch.embeddings), metric)
        if num_dimensions not in (None, points.raw.shape[1]):
            raise ConfigError(f"embeddings of {points.raw.shape[1]} dimensions beside some of {num_dimensions}, which do not compare")
        num_dimensions = points.raw.shape[1]
        names.add(batch.items)
        write(np.ascontiguousarray(centred(points, np.zeros(num_dimensions))).data)
        items.add(batch.items)
        num_items += len(batch.items)
    return num_items, num_dimensions


def _rows(info: IndexInfo, folder: Path) -> NDArray[np.float32]:
    return np.memmap(info.vectors(folder), dtype=np.float32, mode="r", shape=(info.num_items, info.num_dimensions))


def _finish(folder: Path, info: IndexInfo) -> Index:
    """Measure the recall of an approximate index, and make the new files the index."""
    if info.kind != "exact" and info.num_items > 1:
        info = info.model_copy(update={"found": _measure(Index(folder, info))})
    return Index(folder, commit(folder, info))


# ---------------------------------------------------------------- approximate ones


def _shards(rows_ND: NDArray[np.float32]) -> list[EmbeddingShard]:
    """Return the rows as shards for the evaluator; the labels are unused."""
    return [
        EmbeddingShard(partial(rows_ND.__getitem__, rows), np.zeros(rows.stop - rows.start, dtype=np.int64))
        for rows in blocks(len(rows_ND), NUM_ROWS_AT_ONCE)
    ]


def _build_approximate(rows_ND: NDArray[np.float32], metric: Metric, approximation: ApproximateConfig) -> Any:
    if approximation.index == "ivf_pq" and len(rows_ND) < LEAST_COMPRESSED:
        raise ConfigError(f"--approximate pq learns to compress from {LEAST_COMPRESSED} items at least, and there are {len(rows_ND)}")
    return build(_shards(rows_ND), len(rows_ND), np.zeros(rows_ND.shape[1]), metric, approximation)


def _fill(index: Any, rows_ND: NDArray[np.float32]) -> None:
    for rows in blocks(len(rows_ND), NUM_ROWS_AT_ONCE):
        index.add(np.ascontiguousarray(rows_ND[rows]))


def _save(index: Any, path: Path) -> None:
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise OSError(f"{path}: {str(error).splitlines()[0][-120:]}") from None


def _measure(index: Index) -> Found:
    """Search for a sample of the items, each excluded from its own neighbours, and compare with the exact search."""
    assert index.info.approximation is not None
    num_items = index.num_items
    generator = np.random.default_rng(SEED)
    sample = np.sort(generator.permutation(num_items)[: index.info.approximation.num_sampled_queries])
    rows_SD = index.vectors_ND[sample]
    # Each k by its own search: one for 100 examines more candidates than one for 10, and finds more of the first 10.
    found = {k: search_others(index.approximately, rows_SD, sample, min(k, num_items - 1)) for k in RECALL_AT}
    recalls = index_recall(_shards(index.vectors_ND), as_points(rows_SD, index.metric), sample, found)
    return Found(recalls={k: recalls[f"index_recall@{k}"] for k in RECALL_AT}, num_queries=len(sample), seed=SEED)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_NAMES_SHOWN} more" if len(names) > NUM_NAMES_SHOWN else ""
    return ", ".join(names[:NUM_NAMES_SHOWN]) + more
