"""Create the batches of an index from images, which a model embeds, or from existing embeddings."""

import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from torch import Tensor

from dml_core.errors import DataError, EvaluationError
from dml_core.files import check_regular, read_regular
from dml_core.index.items import Item
from dml_core.index.thumbnails import thumbnail
from dml_core.index.writing import Batch
from dml_core.trained import TrainedModel
from tasks.models.embed import ITEMS_FILE, PLAN_FILE, ROLE
from tasks.models.sources import Images
from tasks.runs.embeddings import MANIFEST_FILE

NUM_IMAGES_AT_ONCE = 64
NUM_ROWS_AT_ONCE = 8192
NUM_THREADS = 2  # decode while the network runs
WRITTEN_BY = "expected output of `dml embed`"


def batches_of_images(model: TrainedModel, images: Images, thumbnail_pixels: int, bad: list[str] | None = None) -> Iterator[Batch]:
    """Embed images with thumbnails, 64 at a time; 0 pixels mean no thumbnails.

    Args:
        model: network that embeds them.
        images: images to embed.
        thumbnail_pixels: longer side of a thumbnail.
        bad: list that receives the errors of unreadable images, which are then skipped; with None the first one raises.

    Raises:
        DataError: a file is missing or not an image; the message names it.
    """

    def load(place: int) -> tuple[Tensor, Item] | str:
        try:
            return _loaded(model, images, place, thumbnail_pixels)
        except DataError as error:
            if bad is None:
                raise
            return str(error)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for start in range(0, len(images), NUM_IMAGES_AT_ONCE):
            loaded = list(pool.map(load, range(start, min(start + NUM_IMAGES_AT_ONCE, len(images)))))
            good = [found for found in loaded if not isinstance(found, str)]
            if bad is not None:
                bad += [found for found in loaded if isinstance(found, str)]
            if good:
                yield Batch(model.embed_views([view for view, _ in good]), [item for _, item in good])


def _loaded(model: TrainedModel, images: Images, place: int, thumbnail_pixels: int) -> tuple[Tensor, Item]:
    name = images.names[place]
    try:
        data = images.read(place)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from None
    picture = thumbnail(data, name, thumbnail_pixels) if thumbnail_pixels else None
    view = model.view(data, None if images.boxes is None else images.boxes[place], name)
    return view, Item(name, None if images.classes is None else images.classes[place], picture)


def is_embeddings(source: Path) -> bool:
    """Return whether a path holds embeddings and not images: a folder, `.npz` or `.parquet` written by `dml embed`."""
    if source.is_dir():
        return (source / PLAN_FILE).is_file()
    if source.suffix == ".parquet" and source.is_file():
        return "embedding" in _schema(source).names
    return source.suffix == ".npz"


class Embeddings:
    """Embeddings written by `dml embed`, with the identity of their model.

    Args:
        source: a folder, a `.npz` or a `.parquet`.
        images: folder that the names refer to, for thumbnails; None omits these.
        thumbnail_pixels: their longer side.

    Raises:
        EvaluationError: the source is not embeddings with names and a model.
    """

    def __init__(self, source: Path, images: Path | None = None, thumbnail_pixels: int = 0) -> None:
        self._source, self._images, self._pixels = source, images, thumbnail_pixels
        self.model_identity = _identity(source)

    def batches(self) -> Iterator[Batch]:
        """Yield the embeddings, some thousands at a time."""
        read = _rows_of_folder if self._source.is_dir() else _rows_of_npz if self._source.suffix == ".npz" else _rows_of_parquet
        for embeddings, names, labels in _readable(self._source, read(self._source)):
            items = [
                Item(str(name), None if label is None else str(label), self._thumbnail(str(name)))
                for name, label in zip(names, labels, strict=True)
            ]
            yield Batch(embeddings, items)

    def _thumbnail(self, name: str) -> bytes | None:
        if self._images is None or not self._pixels:
            return None
        path = self._images / name
        try:
            return thumbnail(read_regular(path), str(path), self._pixels)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); name the folder that the names are in") from None


# ---------------------------------------------------------------- files


def _identity(path: Path) -> str:
    if path.is_dir():
        found = str(_read_json(path / PLAN_FILE).get("model", ""))
    elif path.suffix == ".npz":
        with _npz(path) as arrays:
            found = str(arrays["model_identity"]) if "model_identity" in arrays else ""
    else:
        found = ((_schema(path).metadata or {}).get(b"model_identity") or b"").decode()
    if not found:
        raise EvaluationError(f"{path}: does not name the model that made it, so it cannot be compared; {WRITTEN_BY}")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path))
    except FileNotFoundError:
        raise EvaluationError(f"{path}: missing, so the embeddings are incomplete; run `dml embed` again") from None
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise EvaluationError(f"{path}: cannot be read; run `dml embed` again")
    return found


def _npz(path: Path) -> Any:
    try:
        check_regular(path)
        return np.load(path, allow_pickle=False)
    except (BadZipFile, OSError, ValueError, EOFError) as error:
        raise EvaluationError(f"{path}: cannot be read ({str(error).splitlines()[0]}); {WRITTEN_BY}") from None


def _schema(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as a table ({str(error).splitlines()[0]})") from None


def _readable(source: Path, rows: Iterator[tuple[Any, Any, Any]]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the rows of embeddings.

    Raises:
        EvaluationError: a file is missing, damaged, or not written by `dml embed`.
    """
    import pyarrow as pa

    try:
        yield from rows
    except (pa.ArrowException, BadZipFile, zlib.error, OSError, EOFError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise EvaluationError(f"{source}: cannot be read ({reason}); {WRITTEN_BY}") from None


def _rows_of_folder(folder: Path) -> Iterator[tuple[Any, Any, Any]]:
    from pyarrow import parquet

    entry = _read_json(folder / MANIFEST_FILE)[ROLE]
    items = parquet.read_table(folder / ITEMS_FILE)
    if len(items) != entry["rows"]:
        raise EvaluationError(f"{folder}: {entry['rows']} embeddings and {len(items)} names; run `dml embed` again")
    start = 0
    for shard in entry["shards"]:
        rows = np.load(folder / shard, allow_pickle=False)
        part = items.slice(start, len(rows))
        yield rows, part["path"].to_pylist(), part["label"].to_pylist() if "label" in items.column_names else [None] * len(rows)
        start += len(rows)


def _rows_of_npz(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    with _npz(path) as arrays:
        missing = [name for name in ("embeddings", "names") if name not in arrays]
        if missing:
            raise EvaluationError(f"{path}: has no array '{missing[0]}'; {WRITTEN_BY}")
        embeddings, names = arrays["embeddings"], arrays["names"]
        labels = arrays["labels"] if "labels" in arrays else [None] * len(names)
    if not len(embeddings) == len(names) == len(labels):
        raise EvaluationError(f"{path}: {len(embeddings)} embeddings, {len(names)} names and {len(labels)} labels; {WRITTEN_BY}")
    for start in range(0, len(names), NUM_ROWS_AT_ONCE):
        rows = slice(start, start + NUM_ROWS_AT_ONCE)
        yield embeddings[rows], names[rows], labels[rows]


def _rows_of_parquet(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    from pyarrow import parquet

    columns = _schema(path).names
    missing = [name for name in ("embedding", "name") if name not in columns]
    if missing:
        raise EvaluationError(f"{path}: has no column '{missing[0]}'; {WRITTEN_BY}")
    for batch in parquet.ParquetFile(path).iter_batches(
        NUM_ROWS_AT_ONCE, columns=[name for name in columns if name in ("embedding", "name", "label")]
    ):
        names = batch["name"].to_pylist()
        values = batch["embedding"].flatten().to_numpy(zero_copy_only=False)
        if len(values) % len(names):
            raise EvaluationError(f"{path}: embeddings of different lengths; {WRITTEN_BY}")
        labels = batch["label"].to_pylist() if "label" in columns else [None] * len(names)
        yield values.reshape(len(names), -1), names, labels
