"""From what a person names to the batches of an index: images that a model embeds, or embeddings that are there already."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dml_core.errors import ConfigError, DataError, EvaluationError
from dml_core.index.items import Item
from dml_core.index.thumbnails import thumbnail
from dml_core.index.writing import Batch
from dml_core.trained import TrainedModel
from tasks.use.images import ListedImage, listed_images

NUM_IMAGES_AT_ONCE = 64
NUM_ROWS_AT_ONCE = 8192
NUM_THREADS = 2  # that decode while the network works
WRITTEN_BY = "expected what `dml embed` writes"


def batches_of_images(model: TrainedModel, images: list[ListedImage], thumbnail_pixels: int) -> Iterator[Batch]:
    """Embedded images with their thumbnails, 64 at a time; without thumbnails where they are to have 0 pixels.

    Raises:
        DataError: a file that is missing or no image; the line names it.
    """

    def load(image: ListedImage) -> tuple[Any, Item]:
        try:
            data = image.path.read_bytes()
        except OSError as error:
            raise DataError(f"{image.path}: cannot be read ({error.strerror or error})") from None
        picture = thumbnail(data, str(image.path), thumbnail_pixels) if thumbnail_pixels else None
        return model.view(data, image.box, str(image.path)), Item(image.name, image.class_name, picture)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for start in range(0, len(images), NUM_IMAGES_AT_ONCE):
            loaded = list(pool.map(load, images[start : start + NUM_IMAGES_AT_ONCE]))
            yield Batch(model.embed_views([view for view, _ in loaded]), [item for _, item in loaded])


def is_embeddings(source: Path) -> bool:
    """Whether a place has embeddings rather than images."""
    if source.is_dir():
        shards = sorted(source.glob("*.parquet"))
        return bool(shards) and is_embeddings(shards[0])
    if source.suffix == ".parquet" and source.is_file():
        return "embedding" in _schema(source).names
    return source.suffix == ".npz"


class Embeddings:
    """Embeddings of a file or a folder of shards, with the identity of the model that made them.

    Args:
        source: a `.npz`, a `.parquet`, or a folder of such.
        images: where the images are that they were made of, for thumbnails; None leaves these out.
        thumbnail_pixels: their longer side.

    Raises:
        EvaluationError: not embeddings with names and a model.
    """

    def __init__(self, source: Path, images: Path | None = None, thumbnail_pixels: int = 0) -> None:
        self._files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
        self._images, self._pixels = images, thumbnail_pixels
        identities = {_identity(path) for path in self._files}
        if len(identities) != 1:
            raise EvaluationError(f"{source}: embeddings of several models ({', '.join(sorted(identities))}), which do not compare")
        self.model_identity = identities.pop()

    def batches(self) -> Iterator[Batch]:
        """The embeddings, some thousands at a time."""
        for path in self._files:
            for embeddings, names, labels in _rows_of_npz(path) if path.suffix == ".npz" else _rows_of_parquet(path):
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
            return thumbnail(path.read_bytes(), str(path), self._pixels)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); name the folder that the names are in") from None


def images_of(source: Path) -> list[ListedImage]:
    """The images of a source that has no embeddings.

    Raises:
        DataError: nothing of the kind.
        ConfigError: a list of arrays without names.
    """
    if source.suffix == ".npy":
        raise ConfigError(f"{source}: an array has no names of images and no model; {WRITTEN_BY}, or a folder of images")
    return listed_images(source)


# ---------------------------------------------------------------- files


def _identity(path: Path) -> str:
    if path.suffix == ".npz":
        with _npz(path) as arrays:
            found = str(arrays["model_identity"]) if "model_identity" in arrays else ""
    else:
        found = ((_schema(path).metadata or {}).get(b"model_identity") or b"").decode()
    if not found:
        raise EvaluationError(f"{path}: says nothing of the model that made it, so that nothing can be compared with it; {WRITTEN_BY}")
    return found


def _npz(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise EvaluationError(f"{path}: cannot be read ({str(error).splitlines()[0]}); {WRITTEN_BY}") from None


def _schema(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not readable as a table ({str(error).splitlines()[0]})") from None


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
        NUM_ROWS_AT_ONCE, [name for name in columns if name in ("embedding", "name", "label")]
    ):
        names = batch["name"].to_pylist()
        values = batch["embedding"].flatten().to_numpy(zero_copy_only=False)
        if len(values) % len(names):
            raise EvaluationError(f"{path}: embeddings of different lengths; {WRITTEN_BY}")
        labels = batch["label"].to_pylist() if "label" in columns else [None] * len(names)
        yield values.reshape(len(names), -1), names, labels
