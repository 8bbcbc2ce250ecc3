"""Embed any number of images into shards: memory is bounded, interrupted runs resume, bad images are listed.

The images are split into shards in order. Each shard is written atomically; the manifest, which makes the folder readable (`dml evaluate
--embeddings FOLDER`), comes last. An interrupted run is resumed if it has the same images and the same network.
"""

import csv
import hashlib
import io
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import Tensor

from dml_core.errors import ConfigError, DataError, DmlError, StoreError
from dml_core.files import writing
from dml_core.trained import TrainedModel, load_model
from tasks.files import write_whole
from tasks.locks import FileLock
from tasks.models.sources import Images
from tasks.runs.embeddings import MANIFEST_FILE

ROLE = "images"  # their role in the manifest
PLAN_FILE, ITEMS_FILE, BAD_FILE = "plan.json", "items.parquet", "bad.csv"
SHARD_ROWS = 4096
NUM_SHOWN = 10


@dataclass(frozen=True)
class Embedded:
    """Result of embedding.

    Attributes:
        num_rows: number of embedded images.
        num_reused: number of those that an earlier run had embedded.
        bad: name and reason of each skipped image.
    """

    num_rows: int
    num_reused: int
    bad: tuple[tuple[str, str], ...]


SINGLE_FILES = (".npz", ".parquet")
Rows = tuple[NDArray[np.float32], list[tuple[int, str]]]  # of a shard: rows of the good images in order, place and reason of the bad ones

Spread = Callable[[Images, list[range]], Iterator[Rows]]


def embed_images(
    model: TrainedModel,
    images: Images,
    out: Path,
    skip_bad: bool = False,
    batch_size: int = 64,
    shard_rows: int = SHARD_ROWS,
    progress: Callable[[int, int], None] | None = None,
    spread: Spread | None = None,
) -> Embedded:
    """Embed images into the folder `out`, resuming an interrupted run of the same images.

    Args:
        model: the network.
        images: images, in the order of the rows.
        out: `images-*.npy` (n, D) float32, `images-labels.npy` if classes are known, `items.parquet` (path and label of each row) and
            `manifest.json`, which comes last. `bad.csv` lists what could not be embedded.
        skip_bad: omit files that are not images; else all files are read, and bad ones raise an error at the end.
        batch_size: images per forward pass.
        shard_rows: images per shard.
        progress: called with (images done, total images).
        spread: computes the shards elsewhere; None for this process.

    Raises:
        ConfigError: `out` has other contents.
        DataError: there are bad images that are not to be skipped.
        StoreError: `out` cannot be written.
    """
    starts = range(0, len(images), shard_rows)
    names = [f"{ROLE}-{number:05d}-of-{len(starts):05d}.npy" for number in range(len(starts))]
    try:
        _take_up(out, _plan(model, images, shard_rows))
        shards = {name: range(start, min(start + shard_rows, len(images))) for start, name in zip(starts, names, strict=True)}
        to_do = {name: places for name, places in shards.items() if not (out / name).is_file() or _bad_of(out, name).exists()}
        num_reused = num_done = len(images) - sum(map(len, to_do.values()))
        here = (embed_places(model, images, places, batch_size) for places in to_do.values())
        for name, found in zip(to_do, here if spread is None else spread(images, list(to_do.values())), strict=True):
            _write_shard(out, name, found)
            num_done += len(to_do[name])
            if progress is not None:
                progress(num_done, len(images))
        bad = [(place, why) for name in names if _bad_of(out, name).exists() for place, why in json.loads(_bad_of(out, name).read_text())]
        told = tuple((images.names[place], why) for place, why in bad)
        _tell_bad(out, told)
        if bad and (not skip_bad or len(bad) == len(images)):
            raise DataError(_said(told, len(images), out))
        left_out = {place for place, _ in bad}
        _finish(out, images, [place for place in range(len(images)) if place not in left_out], names, model.num_dimensions)
    except OSError as error:
        raise StoreError(f"{out}: embeddings cannot be written ({error.strerror or error}); free space or name another place") from None
    return Embedded(len(images) - len(bad), num_reused, told)


def embed_to(model: TrainedModel, images: Images, out: Path, **options: Any) -> Embedded:
    """Embed into a folder, or into one file: `.npz` (`embeddings`, `names`, `labels`, `model_identity`; all rows are in memory at once) or
    `.parquet` (columns `name`, `embedding`, `label`; one row group per shard). Shards of a file are next to it until it is complete.

    Raises:
        As `embed_images`, whose options are accepted; also ConfigError if another process is writing `out`.
    """
    lock = FileLock(out.with_name(f".{out.name}.lock"))
    if not lock.acquire(wait=False):
        raise ConfigError(f"{out}: another dml embed ({lock.holder()}) is writing it; wait for its end, or name another place")
    try:
        if out.suffix not in SINGLE_FILES:
            return embed_images(model, images, out, **options)
        return _embed_to_file(model, images, out, **options)
    finally:
        lock.release(remove=True)


def _embed_to_file(model: TrainedModel, images: Images, out: Path, **options: Any) -> Embedded:
    folder = out.with_name(f"{out.name}.shards")
    found = embed_images(model, images, folder, **options)
    try:
        with writing(out) as file:
            (_join_npz if out.suffix == ".npz" else _join_parquet)(folder, file, model.identity)
        shutil.rmtree(folder)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written ({error.strerror or error}); its shards are in {folder}") from None
    return found


def _join_npz(folder: Path, file: IO[bytes], identity: str) -> None:
    items = pq.read_table(folder / ITEMS_FILE)
    rows = np.concatenate([np.load(folder / name) for name in json.loads((folder / MANIFEST_FILE).read_text())[ROLE]["shards"]])
    arrays: dict[str, Any] = {"embeddings": rows, "names": np.array(items["path"].to_pylist()), "model_identity": np.array(identity)}
    if "label" in items.column_names:
        arrays["labels"] = np.array(items["label"].to_pylist())
    np.savez(file, **arrays)


def _join_parquet(folder: Path, file: IO[bytes], identity: str) -> None:
    items = pq.read_table(folder / ITEMS_FILE).rename_columns({"path": "name"})
    entry, start = json.loads((folder / MANIFEST_FILE).read_text())[ROLE], 0
    embedding = pa.field("embedding", pa.list_(pa.float32(), entry["dimensions"]))
    schema = items.schema.append(embedding).with_metadata({"model_identity": identity})
    with pq.ParquetWriter(file, schema) as rows_file:
        for name in entry["shards"]:
            rows = np.load(folder / name)
            if not len(rows):
                continue  # all of its images were bad
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), entry["dimensions"])
            rows_file.write_table(items.slice(start, len(rows)).append_column(embedding, column).cast(schema))
            start += len(rows)


def embed_places(model: TrainedModel, images: Images, places: range, batch_size: int) -> Rows:
    """Embed the images at these positions; threads read and decode the next batch while one is in the network."""
    rows: list[NDArray[np.float32]] = []
    bad: list[tuple[int, str]] = []
    for batch in _decoded(model, images, places, batch_size):
        bad += [(place, found) for place, found in batch if isinstance(found, str)]
        views = [found for _, found in batch if not isinstance(found, str)]
        rows += [model.embed_views(views)] if views else []
    return np.concatenate(rows) if rows else np.empty((0, model.num_dimensions), np.float32), bad


@dataclass(frozen=True)
class OnCluster:
    """Computes shards on a Ray cluster: its nodes read the images, so every node must have access to them.

    Attributes:
        folder: folder of the network, whose files are sent.
        batch_size: images per forward pass.
    """

    folder: Path
    batch_size: int = 64

    def __call__(self, images: Images, shards: list[range]) -> Iterator[Rows]:
        """Yield the rows of each shard, in order."""
        from tasks.workers.distribution import spread

        files = {path.name: path.read_bytes() for path in sorted(self.folder.iterdir()) if path.is_file()}
        return spread(_embed_there, (files, images, self.batch_size), shards)


def _embed_there(shared: tuple[dict[str, bytes], Images, int], places: range) -> Rows:
    """Embed one shard in the current process, which caches the network."""
    files, images, batch_size = shared
    if images.root is not None and not images.root.is_dir():
        raise DataError(
            f"{images.root} is missing on {socket.gethostname()}; on a cluster the images must be in S3 or on a shared file system"
        )
    key = hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in files.values())).digest()
    if key not in _opened:
        with tempfile.TemporaryDirectory() as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            _opened[key] = load_model(folder)
    return embed_places(_opened[key], images, places, batch_size)


_opened: dict[bytes, TrainedModel] = {}


def _decoded(model: TrainedModel, images: Images, places: range, batch_size: int) -> Iterator[list[tuple[int, Tensor | str]]]:
    def view(place: int) -> Tensor | str:
        try:
            return model.view(images.read(place), images.boxes[place] if images.boxes is not None else None)
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"
        except DmlError as error:
            return str(error).removeprefix("image: ")

    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1)), "decode") as pool:
        waiting: list[list[tuple[int, Future[Tensor | str]]]] = []
        for start in range(places.start, places.stop, batch_size):
            waiting.append([(place, pool.submit(view, place)) for place in range(start, min(start + batch_size, places.stop))])
            if len(waiting) > 1:
                yield [(place, future.result()) for place, future in waiting.pop(0)]
        yield from ([(place, future.result()) for place, future in batch] for batch in waiting)


def _plan(model: TrainedModel, images: Images, shard_rows: int) -> dict[str, Any]:
    """Describe the folder's content: another plan means other embeddings."""
    listed = json.dumps([images.names, images.classes, images.boxes])
    of = {"images": len(images), "names_sha256": hashlib.sha256(listed.encode()).hexdigest(), "shard_rows": shard_rows}
    graph = model.description.graph
    how = "" if graph is None else f"{graph.format} {graph.precision}"
    return {"model": model.identity, "exported_as": how, "title": model.title, "metric": model.metric, **of}


def _take_up(out: Path, plan: dict[str, Any]) -> None:
    """Start the folder, or resume it.

    Raises:
        ConfigError: it has other contents.
    """
    path = out / PLAN_FILE
    if path.is_file():
        try:
            begun = json.loads(path.read_bytes())
        except ValueError:
            raise ConfigError(f"{path}: damaged; remove {out}, or name another folder") from None
        if begun != plan:
            raise ConfigError(f"{out}: holds embeddings of other images or by another network; name another folder, or remove it")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: already exists and was not created by dml embed; name another folder")
    write_whole(path, json.dumps(plan, indent=1))


def _bad_of(out: Path, shard: str) -> Path:
    return out / f".{shard}.bad.json"


def _write_shard(out: Path, name: str, found: Rows) -> None:
    """Write a shard, after the list of its bad images: if interrupted between the two, it is made again."""
    rows, bad = found
    if bad:
        write_whole(_bad_of(out, name), json.dumps(bad))
    _save(out / name, rows)
    if not bad:
        _bad_of(out, name).unlink(missing_ok=True)


def _save(path: Path, array: NDArray[Any]) -> None:
    with writing(path) as file:
        np.save(file, array)


def _finish(out: Path, images: Images, places: list[int], shards: list[str], num_dimensions: int) -> None:
    """Write labels, items and, last, the manifest."""
    entry: dict[str, Any] = {"rows": len(places), "dimensions": num_dimensions, "shards": shards}
    columns = {"path": pa.array([images.names[place] for place in places])}
    if images.classes is not None:
        classes = [images.classes[place] for place in places]
        _save(out / f"{ROLE}-labels.npy", np.array(classes))
        entry["labels"] = f"{ROLE}-labels.npy"
        columns["label"] = pa.array(classes)
    with writing(out / ITEMS_FILE) as file:
        pq.write_table(pa.table(columns), file)
    write_whole(out / MANIFEST_FILE, json.dumps({ROLE: entry}, indent=1))


def _tell_bad(out: Path, bad: tuple[tuple[str, str], ...]) -> None:
    if not bad:
        (out / BAD_FILE).unlink(missing_ok=True)
        return
    text = io.StringIO()
    csv.writer(text).writerows([("path", "why"), *bad])
    write_whole(out / BAD_FILE, text.getvalue())


def _said(bad: tuple[tuple[str, str], ...], num_images: int, out: Path) -> str:
    shown = "; ".join(f"{name}: {why}" for name, why in bad[:NUM_SHOWN]) + ("; ..." if len(bad) > NUM_SHOWN else "")
    return f"{len(bad)} of {num_images} images are bad ({shown}); {out / BAD_FILE} lists all: fix them, or skip them with --skip-bad"
