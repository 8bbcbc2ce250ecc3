"""Building and changing an index. An interruption leaves the index unchanged (see `layout.py`).

A change rewrites the vectors and items: a few seconds for a million. Adding extends an approximate index's lists or graph; removing refills
them, because positions change, and for a graph this is as slow as building it.

Shapes: N items, D dimensions, S sampled items, k neighbours.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_args

import faiss
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dml_core.errors import ConfigError, EvaluationError, first_line
from dml_core.evaluation.config import Metric
from dml_core.evaluation.inputs import EmbeddingShard, checked_embeddings
from dml_core.evaluation.retrieval.approximate import build, index_recall, search_others
from dml_core.evaluation.retrieval.geometry import as_points, blocks, centred
from dml_core.index.choosing import choose
from dml_core.index.index import Index, mapped_vectors, read_approximate
from dml_core.index.items import SCHEMA, Item, as_table
from dml_core.index.layout import (
    APPROXIMATE,
    ITEMS,
    VECTORS,
    IndexInfo,
    MeasuredRecall,
    changing,
    check_place,
    commit,
    from_caller,
    read_info,
)

RECALL_AT = (1, 10, 100)
SEED = 0
NUM_ROWS_AT_ONCE = 65_536
NUM_ROWS_COPIED = 8192  # with their thumbnails
NUM_NAMES_SHOWN = 3
LEAST_COMPRESSED = 256  # a byte encodes this many parts of vectors
Part = tuple[NDArray[np.float32], Any]  # vectors as stored, (n, D), and the table of their items


class Batch(NamedTuple):
    """Some items with their embeddings, (n, D)."""

    embeddings: NDArray[Any]
    items: Sequence[Item]


def build_index(
    folder: str | Path,
    batches: Iterable[Batch],
    model_identity: str,
    metric: Metric = "cosine",
    approximate: str | None = None,
    model_source: str | None = None,
    replace: bool = False,
    weights_sha256: str | None = None,
) -> Index:
    """Build an index.

    Args:
        folder: folder of the index; created if missing.
        batches: the items; one batch at a time is in memory.
        model_identity: identity of the embeddings' network.
        approximate: "ivf", "pq", "hnsw", "auto" (by size); None searches exactly.
        replace: replace an existing index.
        weights_sha256: hash of the network's weights (`TrainedModel.weights_sha256`), if known: networks with others are then refused.

    Raises:
        ConfigError: an index or other files exist already, there are no items, names repeat, texts are none, sizes do not fit, or the
            metric is unknown.
        EvaluationError: embeddings cannot be compared, or are too few for the approximate index.
        StoreError: the folder cannot be written.
    """
    if metric not in get_args(Metric):
        raise ConfigError(f"metric {metric!r}: expected one of {', '.join(get_args(Metric))}")
    if not isinstance(model_identity, str) or not all(isinstance(text, str | None) for text in (model_source, weights_sha256)):
        raise ConfigError("model_identity is text; model_source and weights_sha256 are text or None")
    folder = Path(folder)
    with changing(folder) as version:
        check_place(folder, replace)
        num_items, num_dimensions = _write(folder, version, _parts(folder, batches, metric, "nothing to index"))
        kind, approximation, reason = choose(approximate, num_items, num_dimensions)
        info = IndexInfo(
            model_identity=model_identity,
            model_source=model_source,
            weights_sha256=weights_sha256,
            metric=metric,
            num_items=num_items,
            num_dimensions=num_dimensions,
            kind=kind,
            reason=reason,
            approximation=approximation,
            version=version,
        )
        if approximation is not None:
            if kind == "pq" and num_items < LEAST_COMPRESSED:
                raise ConfigError(f"--approximate pq learns to compress from {LEAST_COMPRESSED} items at least, and there are {num_items}")
            shards = _shards(mapped_vectors(folder, info))
            _save(build(shards, num_items, np.zeros(num_dimensions), metric, approximation), info.path(folder, APPROXIMATE))
        return _finish(folder, info)


def add_items(folder: str | Path, batches: Iterable[Batch], model_identity: str, weights_sha256: str | None = None) -> Index:
    """Add items to an index; `model_identity` and `weights_sha256` are of the network that embedded them.

    Raises:
        ConfigError: no index there, embeddings of another model, or a name that the index already has.
        EvaluationError: embeddings cannot be compared.
        StoreError: the folder cannot be read or written.
    """
    folder = Path(folder)
    read_info(folder)
    with changing(folder) as version:
        old = Index.open(folder)
        old.check_model(model_identity, weights_sha256)
        added = _parts(folder, batches, old.metric, "nothing to add", old.num_dimensions, frozenset(old.names()))
        return _replace(old, version, chain(_parts_of(old), added), num_unchanged=old.num_items)


def remove_items(folder: str | Path, names: str | Sequence[str]) -> Index:
    """Remove an item or several by name; if a name is unknown, remove none.

    Raises:
        ConfigError: no index there, a name is unknown, or no item would remain.
        StoreError: the folder cannot be read or written.
    """
    folder = Path(folder)
    read_info(folder)
    with changing(folder) as version:
        old = Index.open(folder)
        present, unwanted = old.names(), {names} if isinstance(names, str) else set(names)
        unknown = sorted(map(str, unwanted.difference(present)))
        if unknown:
            more = f" and {len(unknown) - NUM_NAMES_SHOWN} more" if len(unknown) > NUM_NAMES_SHOWN else ""
            raise ConfigError(f"{folder}: has no item named {', '.join(unknown[:NUM_NAMES_SHOWN])}{more}; nothing was removed")
        remaining_N = np.array([name not in unwanted for name in present])
        if not remaining_N.any():
            raise ConfigError(f"{folder}: nothing would be left of the index; delete the folder instead")
        return _replace(old, version, _parts_of(old, remaining_N), num_unchanged=0)


def check_names(folder: Path, names: Iterable[str], present: Collection[str] = (), seen: set[str] | None = None) -> None:
    """Check that names are neither twice nor among `present`, those of the index in `folder`; `seen` has earlier ones and receives these.

    Raises:
        ConfigError: one is.
    """
    seen = set() if seen is None else seen
    for name in names:
        if name in present:
            raise ConfigError(f"{folder}: has an item named {name} already; remove it first with `dml index remove`, or leave it out")
        if name in seen:
            raise ConfigError(f"two images are named {name}; an index finds each by a unique name")
        seen.add(name)


# ---------------------------------------------------------------- the files


def _parts(
    folder: Path,
    batches: Iterable[Batch],
    metric: Metric,
    if_empty: str,
    num_dimensions: int | None = None,
    present: frozenset[str] = frozenset(),
) -> Iterator[Part]:
    """Yield batches in the form of the stored vectors and items, after checking them and that no name is twice or among `present`."""
    names: set[str] = set()
    for batch in from_caller(batches):
        if not isinstance(batch, Batch):
            raise ConfigError(f"expected a list of Batch(embeddings, items), found a {type(batch).__name__} in it")
        if not len(batch.items):
            continue
        if len(batch.items) != len(batch.embeddings):
            raise EvaluationError(f"{len(batch.embeddings)} embeddings for {len(batch.items)} images; one is needed for each")
        points = as_points(checked_embeddings(batch.embeddings), metric)
        if num_dimensions not in (None, points.raw.shape[1]):
            raise ConfigError(f"embeddings of {points.raw.shape[1]} dimensions among some of {num_dimensions}, which cannot be compared")
        num_dimensions = points.raw.shape[1]
        for item in batch.items:
            if not isinstance(item, Item) or not _is_text(item.name) or not (item.class_name is None or _is_text(item.class_name)):
                raise ConfigError(f"{item!r} is no item of an index: expected an Item whose name and class are text in UTF-8")
        check_names(folder, (item.name for item in batch.items), present, names)
        yield centred(points, np.zeros(num_dimensions)), as_table(batch.items)
    if not names:
        raise ConfigError(f"{folder}: {if_empty}; name a folder, a list or embeddings with one image at least")


def _is_text(value: object) -> bool:
    """Return whether a value is text that UTF-8 can encode, as the names of most files are."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _parts_of(index: Index, remaining_N: NDArray[np.bool_] | None = None) -> Iterator[Part]:
    """Yield the rows of an index in parts, only those in `remaining_N` if given."""
    for rows in blocks(index.num_items, NUM_ROWS_COPIED):
        vectors, items = index.vectors_ND[rows], index.items.slice(rows.start, NUM_ROWS_COPIED)
        yield (vectors, items) if remaining_N is None else (vectors[remaining_N[rows]], items.filter(pa.array(remaining_N[rows])))


def _write(folder: Path, version: str, parts: Iterable[Part]) -> tuple[int, int]:
    """Write the vectors and items of a version as they arrive; return the numbers of items and dimensions."""
    num_items = num_dimensions = 0
    with (
        (folder / VECTORS.format(version)).open("wb") as vectors_file,
        pa.OSFile(str(folder / ITEMS.format(version)), "wb") as items_file,
        pa.ipc.new_file(items_file, SCHEMA) as items_writer,
    ):
        for rows_ND, items in parts:
            vectors_file.write(np.ascontiguousarray(rows_ND).data)
            items_writer.write_table(items)
            num_items, num_dimensions = num_items + len(rows_ND), rows_ND.shape[1]
    return num_items, num_dimensions


def _replace(old: Index, version: str, parts: Iterable[Part], num_unchanged: int) -> Index:
    """Replace an index by one of `parts`, of which the first `num_unchanged` rows are all of the old one's."""
    num_items, _ = _write(old.folder, version, parts)
    info = old.info.model_copy(update={"version": version, "num_items": num_items, "reason": _reason(old.info, num_items)})
    if info.kind != "exact":
        approximate = read_approximate(old.info.path(old.folder, APPROXIMATE), mapped=False)
        if num_unchanged == 0:
            approximate.reset()  # the lists' centres and the codebooks stay as trained
        new_rows_ND = mapped_vectors(old.folder, info)[num_unchanged:]
        for rows in blocks(len(new_rows_ND), NUM_ROWS_AT_ONCE):
            approximate.add(np.ascontiguousarray(new_rows_ND[rows]))
        _save(approximate, info.path(old.folder, APPROXIMATE))
    return _finish(old.folder, info)


def _reason(info: IndexInfo, num_items: int) -> str | None:
    """Return the reason for an index's kind when it has another number of items; None if the kind was requested."""
    if info.reason is None:
        return None
    fitting = choose("auto", num_items, info.num_dimensions)
    if fitting.kind == info.kind:
        return fitting.reason
    return f"for another number of items; build it again with --force as {fitting.kind}: {fitting.reason}"


def _finish(folder: Path, info: IndexInfo) -> Index:
    """Measure the recall of an approximate index, and make the new files the index."""
    found = _measure(Index(folder, info)) if info.kind != "exact" and info.num_items > 1 else None
    return Index(folder, commit(folder, info.model_copy(update={"found": found})))


# ---------------------------------------------------------------- approximate ones


def _shards(rows_ND: NDArray[np.float32]) -> list[EmbeddingShard]:
    """Return the rows as shards for the evaluator; the labels are unused."""
    return [
        EmbeddingShard(partial(rows_ND.__getitem__, rows), np.zeros(rows.stop - rows.start, dtype=np.int64))
        for rows in blocks(len(rows_ND), NUM_ROWS_AT_ONCE)
    ]


def _save(index: Any, path: Path) -> None:
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise OSError(f"{path}: {first_line(error)[-120:]}") from None


def _measure(index: Index) -> MeasuredRecall:
    """Search for a sample of the items, each excluded from its own neighbours, and compare with the exact search."""
    assert index.info.approximation is not None
    num_items = index.num_items
    generator = np.random.default_rng(SEED)
    sample = np.sort(generator.permutation(num_items)[: index.info.approximation.num_sampled_queries])
    rows_SD = index.vectors_ND[sample]
    # Each k by its own search: one for 100 examines more candidates than one for 10, and finds more of the first 10.
    neighbours = {k: search_others(index.approximately, rows_SD, sample, min(k, num_items - 1)) for k in RECALL_AT}
    recalls = index_recall(_shards(index.vectors_ND), as_points(rows_SD, index.metric), sample, neighbours)
    return MeasuredRecall(recalls={k: recalls[f"index_recall@{k}"] for k in RECALL_AT}, num_queries=len(sample), seed=SEED)
