"""Create the batches of an index from images, which a model embeds, or from existing embeddings."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from dml_core.errors import DataError, EvaluationError
from dml_core.files import read_regular
from dml_core.index.items import Item
from dml_core.index.thumbnails import thumbnail
from dml_core.index.writing import Batch
from dml_core.trained import TrainedModel
from tasks.models.embed import embed_batches
from tasks.models.sources import Images
from tasks.runs.embeddings import PLAN_FILE, EmbeddedBy, Part, open_embedded, recorded_network


def batches_of_images(model: TrainedModel, images: Images, thumbnail_pixels: int, bad: list[str] | None = None) -> Iterator[Batch]:
    """Embed images with thumbnails, whose longer side is `thumbnail_pixels`, 64 at a time; 0 makes none.

    The list `bad` receives the errors of unreadable images, which are then skipped; with None the first one raises.

    Raises:
        DataError: a file is missing or not an image; the message names it.
    """
    for batch in embed_batches(model, images, range(len(images)), thumbnail_pixels=thumbnail_pixels):
        errors = [DataError(f"{images.names[position]}: {reason}") for position, reason in batch.bad.items()]
        if bad is not None:
            bad += map(str, errors)
        elif errors:
            raise errors[0]
        items = [
            Item(images.names[position], None if images.classes is None else images.classes[position], picture)
            for position, picture in zip(batch.positions, batch.thumbnails, strict=True)
        ]
        yield Batch(batch.embeddings, items)


def is_embeddings(source: Path) -> bool:
    """Return whether a path holds embeddings and not images: a folder, `.npz` or `.parquet` written by `dml embed`."""
    if source.is_dir():
        return (source / PLAN_FILE).is_file()
    if source.suffix == ".parquet":
        with suppress(pa.ArrowException, OSError):
            return "embedding" in parquet.read_schema(source).names
    return source.suffix == ".npz"


def batches_of_embeddings(source: Path, images: Path | None = None, thumbnail_pixels: int = 0) -> tuple[EmbeddedBy, Iterator[Batch]]:
    """Return the network of embeddings that `dml embed` wrote to a folder, a `.npz` or a `.parquet`, and their batches.

    The names refer to the folder `images`, from which thumbnails are made with the longer side `thumbnail_pixels`; None omits these.

    Raises:
        EvaluationError: the source is not embeddings with names and a model.
    """
    network, parts = recorded_network(source), open_embedded(source)
    if not network.model_identity:
        raise EvaluationError(f"{source}: does not name the model that made it, so it cannot be compared; expected output of `dml embed`")
    if any(part.names is None for part in parts):
        raise EvaluationError(f"{source}: has no names of the images; expected output of `dml embed`")
    return network, _batches(parts, images, thumbnail_pixels)


def _batches(parts: list[Part], images: Path | None, thumbnail_pixels: int) -> Iterator[Batch]:
    for part in parts:
        items = [
            Item(
                str(name),
                None if label is None else str(label),
                _thumbnail(images / str(name), thumbnail_pixels) if images is not None and thumbnail_pixels else None,
            )
            for name, label in zip_longest(part.names or (), () if part.labels is None else part.labels)
        ]
        yield Batch(part.load(), items)


def _thumbnail(path: Path, num_pixels: int) -> bytes:
    try:
        return thumbnail(read_regular(path), str(path), num_pixels)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); name the folder that the names are in") from None
