"""Embed any number of images into shards: memory is bounded, interrupted runs resume, bad images are listed.

The images are split into shards in order. Each shard is written atomically; the manifest, which makes the folder readable (`dml evaluate
--embeddings FOLDER`), comes last. An interrupted run is resumed if it has the same source, names and network; shards with changed images
are embedded again.
"""

import csv
import hashlib
import io
import json
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import Tensor

from dml_core.errors import ConfigError, DataError, DmlError, EvaluationError, StoreError
from dml_core.files import LEFTOVER, remove_leftovers, write_errors, writing
from dml_core.index.thumbnails import thumbnail
from dml_core.models.backbones.registry import backbone_module
from dml_core.network_description import read_description
from dml_core.trained import TrainedModel, load_model
from tasks.environment import num_cores
from tasks.files import write_whole
from tasks.locks import FileLock
from tasks.models.sources import Images
from tasks.runs.embeddings import (
    IMAGES_ROLE,
    ITEMS_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    SINGLE_FILES,
    EmbeddedBy,
    Part,
    RoleEntry,
    open_embedded,
    recorded_network,
    save_array,
    save_manifest,
    shard_ranges,
)
from tasks.runs.identity import source_digests
from tasks.runs.surroundings import versions
from tasks.workers.jobs import check_code

BAD_FILE = "bad.csv"
SHARD_ROWS = 4096
BATCH_SIZE = 64
NUM_SHOWN = 10
Bad = dict[int, str]  # position -> reason of each image that cannot be embedded, in the order of positions
Rows = tuple[NDArray[np.float32], Bad]  # of a shard: rows of the good images in order, and the bad ones
Spread = Callable[[Images, list[range]], Iterator[Rows]]


class Embedded(NamedTuple):
    """Number of embedded images, number of those that an earlier run had embedded, and name and reason of each skipped image."""

    num_rows: int
    num_reused: int
    bad: tuple[tuple[str, str], ...]


class EmbeddedBatch(NamedTuple):
    """The good ones of some images: their positions, embeddings (n, D) and, if requested, thumbnails; and the bad ones."""

    positions: list[int]
    embeddings: NDArray[np.float32]
    thumbnails: list[bytes | None]
    bad: Bad


def embed_batches(
    model: TrainedModel, images: Images, positions: range, batch_size: int = BATCH_SIZE, thumbnail_pixels: int = 0
) -> Iterator[EmbeddedBatch]:
    """Embed the images at these positions; threads read and decode the next batch while one is in the network.

    The longer side of a thumbnail is `thumbnail_pixels`; 0 makes none.
    """

    def decode(position: int) -> tuple[Tensor, bytes | None] | str:
        try:
            data = images.read(position)
            view = model.view(data, None if images.boxes is None else images.boxes[position])
            return view, thumbnail(data, "image", thumbnail_pixels) if thumbnail_pixels else None
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            return f"cannot be read ({getattr(error, 'strerror', None) or error})"
        except StoreError:
            raise  # of the whole bucket, whose other images would count as bad, too
        except DmlError as error:
            return str(error).removeprefix("image: ")

    batches = [positions[start : start + batch_size] for start in range(0, len(positions), batch_size)]
    with ThreadPoolExecutor(min(8, num_cores()), "decode") as pool:
        decoding = pool.map(decode, positions[:batch_size])
        for batch, next_batch in zip_longest(batches, batches[1:], fillvalue=range(0)):
            decoded, decoding = [*decoding], pool.map(decode, next_batch)
            bad = {position: image for position, image in zip(batch, decoded, strict=True) if isinstance(image, str)}
            views = [(position, *image) for position, image in zip(batch, decoded, strict=True) if not isinstance(image, str)]
            rows, refused = model.try_views([view for _, view, _ in views])
            infinite = np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist()
            refused = dict.fromkeys(infinite, "its embedding is not finite") | refused  # whose own rows are not set
            bad |= {views[place][0]: reason for place, reason in refused.items()}
            good = [place for place in range(len(views)) if place not in refused]
            thumbnails = [views[place][2] for place in good]
            yield EmbeddedBatch([views[place][0] for place in good], rows[good], thumbnails, dict(sorted(bad.items())))


def embed_images(
    model: TrainedModel,
    images: Images,
    out: Path,
    skip_bad: bool = False,
    batch_size: int = BATCH_SIZE,
    shard_rows: int = SHARD_ROWS,
    progress: Callable[[int, int], None] | None = None,
    spread: Spread | None = None,
) -> Embedded:
    """Embed images into the folder `out`, resuming an interrupted run of the same images; shards of images that changed are made again.

    Args:
        images: in the order of the rows.
        out: `images-*.npy` (n, D) float32, `images-labels.npy` if classes are known, `items.parquet` (path and label of each row) and
            `manifest.json`, which comes last. `bad.csv` lists what could not be embedded.
        skip_bad: omit files that are not images; else all files are read, and bad ones raise an error at the end.
        progress: called with (images done, total images).
        spread: computes the shards elsewhere; None for this process.

    Raises:
        ConfigError: `out` has other contents.
        DataError: there are bad images that are not to be skipped.
        StoreError: `out` cannot be written.
    """
    rows_of = shard_ranges(IMAGES_ROLE, len(images), shard_rows)
    with write_errors(f"{out}: embeddings", "free space or name another place"):
        shards = {name: hashlib.sha256("\n".join(map(images.version, rows)).encode()).hexdigest() for name, rows in rows_of.items()}
        _begin_or_resume(out, _plan(model, images, shard_rows), shards, _names_sha256(images, images.classes))
        remove_leftovers(out)
        missing = {name: rows for name, rows in rows_of.items() if not (out / name).is_file() or _bad_file(out, name).exists()}
        bad: Bad = {}
        if missing:
            (out / MANIFEST_FILE).unlink(missing_ok=True)  # of an earlier run that skipped bad images
        num_reused = num_done = len(images) - sum(map(len, missing.values()))
        in_process = (embed_shard(model, images, rows, batch_size) for rows in missing.values())
        for name, embedded in zip(missing, in_process if spread is None else spread(images, [*missing.values()]), strict=True):
            _write_shard(out, name, embedded)
            bad |= embedded[1]
            num_done += len(missing[name])
            if progress is not None:
                progress(num_done, len(images))
        named = tuple((images.names[position], reason) for position, reason in bad.items())
        _list_bad(out, named, skip_bad, num_images=len(images))
        _finish(out, images, bad, [*rows_of], model.num_dimensions)
    return Embedded(len(images) - len(bad), num_reused, named)


def embed_to(model: TrainedModel, images: Images, out: Path, **options: Any) -> Embedded:
    """Embed into a folder, or into one file: `.npz` (`embeddings`, `names`, `labels`, `model_identity`, `metric`, `weights_sha256`; all
    rows are in memory at once) or `.parquet` (columns `name`, `embedding`, `label`; one row group per shard). Shards of a file are next to
    it until it is complete.

    Raises:
        As `embed_images`, whose options are accepted; also ConfigError if another process is writing `out`, or if it is a file with
        anything but embeddings of images of these names by this network.
    """
    place = out.absolute()  # the working directory, too, has a name then
    lock = FileLock(place.with_name(f".{place.name}.lock"))
    if not lock.acquire(wait=False):
        raise ConfigError(f"{out}: another dml embed ({lock.holder()}) is writing it; wait for its end, or name another place")
    try:
        save = SINGLE_FILES.get(out.suffix)
        if save is None:
            return embed_images(model, images, out, **options)
        _check_file(out, model, images)
        folder = out.with_name(f"{out.name}.shards")
        embedded = embed_images(model, images, folder, **options)
        with write_errors(f"{out}:", f"its shards are in {folder}"):
            with writing(out) as file:
                save(folder, file)
            shutil.rmtree(folder)
        return embedded
    finally:
        lock.release(remove=True)


def _check_file(out: Path, model: TrainedModel, images: Images) -> None:
    """Reject a file with anything but embeddings of images of these names by this network; bad ones may be missing in it.

    A file does not record the folder of its images, and an older one has no hash of the weights.
    """
    if not (out.exists() or out.is_symlink()):
        return
    network, parts = EmbeddedBy(), list[Part]()
    with suppress(EvaluationError):
        network, parts = recorded_network(out), open_embedded(out)
    if not parts or not network.model_identity:
        raise ConfigError(f"{out}: already exists and was not created by dml embed; name another file")
    known = set(images.names)
    is_same = network.model_identity == model.identity and network.weights_sha256 in (None, model.weights_sha256)
    if not is_same or any(part.names is None or not known.issuperset(part.names) for part in parts):
        raise ConfigError(f"{out}: holds embeddings of other images or by another network; name another file, or remove it")


def embed_shard(model: TrainedModel, images: Images, positions: range, batch_size: int) -> Rows:
    """Return the rows of the images at these positions, and the bad ones."""
    batches = [*embed_batches(model, images, positions, batch_size)]
    return np.concatenate([batch.embeddings for batch in batches]), {place: why for batch in batches for place, why in batch.bad.items()}


def embed_on_cluster(network: Path, batch_size: int, images: Images, shards: list[range]) -> Iterator[Rows]:
    """Yield the rows of each shard, in order, computed on a Ray cluster: its nodes read the images, so every node must have access to them.

    The files of the folder `network` are sent; a shard is the positions of its images. A node with other code or libraries is an error.
    """
    from tasks.workers.distribution import spread

    files = {path.name: path.read_bytes() for path in sorted(network.iterdir()) if path.is_file()}
    sources = source_digests((__name__, backbone_module(read_description(network).model.backbone.name)))
    return spread(_embed_there, (files, images, batch_size, sources, versions()), shards)


def _embed_there(shared: tuple[dict[str, bytes], Images, int, dict[str, str], dict[str, str]], positions: range) -> Rows:
    """Embed one shard in the current process, which caches the network."""
    files, images, batch_size, sources, packages = shared
    check_code(sources, packages, "dml embed")
    if not images.root.startswith("s3://") and not Path(images.root).is_dir():
        raise DataError(
            f"{images.root} is missing on {socket.gethostname()}; on a cluster the images must be in S3 or on a shared file system"
        )
    key = hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in files.values())).digest()
    if key not in _opened:
        with tempfile.TemporaryDirectory() as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            _opened[key] = load_model(folder)
    return embed_shard(_opened[key], images, positions, batch_size)


_opened: dict[bytes, TrainedModel] = {}


def _plan(model: TrainedModel, images: Images, shard_rows: int) -> dict[str, Any]:
    """Describe the folder's content: another plan means other embeddings. Classes are no part of it: they are written at each end."""
    graph = model.description.graph
    exported_as = "" if graph is None else f"{graph.format} {graph.precision}"
    network = {"model": model.identity, "weights_sha256": model.weights_sha256, "exported_as": exported_as}
    network |= {"title": model.title, "metric": model.metric}
    names = {"images": len(images), "names_sha256": _names_sha256(images)}
    return network | {"source": images.root} | names | {"shard_rows": shard_rows}


def _names_sha256(images: Images, classes: list[str] | None = None) -> str:
    """Return a hash of the names and boxes; until 30 November 2026 the classes were in it, too."""
    return hashlib.sha256(json.dumps([images.names, classes, images.boxes]).encode()).hexdigest()


def _begin_or_resume(out: Path, plan: dict[str, Any], shards: dict[str, str], with_classes: str) -> None:
    """Start the folder `out` with the content `plan`, or resume it: shards whose images have changed are removed.

    `shards` is name of each shard -> hash of its images' versions, `with_classes` the `names_sha256` of older plans. A folder with other
    contents is rejected.
    """
    path = out / PLAN_FILE
    if path.is_file():
        try:
            begun = json.loads(path.read_bytes())
        except ValueError:
            raise ConfigError(f"{path}: damaged; remove {out}, or name another folder") from None
        before = begun.pop("shards", None) if isinstance(begun, dict) else None
        is_older = isinstance(before, dict) and begun.get("names_sha256") == with_classes != plan["names_sha256"]
        if is_older:
            begun["names_sha256"] = plan["names_sha256"]
        if not isinstance(before, dict) or {"weights_sha256": plan["weights_sha256"]} | begun != plan:  # older plans have no hash
            raise ConfigError(f"{out}: holds embeddings of other images or by another network; name another folder, or remove it")
        if before == shards and not is_older:
            return
        if before != shards:
            (out / MANIFEST_FILE).unlink(missing_ok=True)  # first: without it the folder is not readable
        for name in shards:
            if before.get(name) != shards[name]:
                (out / name).unlink(missing_ok=True)
    elif out.exists() and (not out.is_dir() or any(not re.fullmatch(LEFTOVER, inside.name) for inside in out.iterdir())):
        raise ConfigError(f"{out}: already exists and was not created by dml embed; name another folder")
    write_whole(path, json.dumps(plan | {"shards": shards}, indent=1))


def _bad_file(out: Path, shard: str) -> Path:
    return out / f".{shard}.bad.json"


def _write_shard(out: Path, name: str, embedded: Rows) -> None:
    """Write a shard, after the list of its bad images: if interrupted between the two, it is made again."""
    rows, bad = embedded
    if bad:
        write_whole(_bad_file(out, name), json.dumps(bad))
    save_array(out / name, rows)
    if not bad:
        _bad_file(out, name).unlink(missing_ok=True)


def _finish(out: Path, images: Images, bad: Bad, shard_names: list[str], num_dimensions: int) -> None:
    """Write labels, items and, last, the manifest."""
    positions = [position for position in range(len(images)) if position not in bad]
    columns = {"path": pa.array([images.names[position] for position in positions])}
    labels = None
    if images.classes is not None:
        classes = [images.classes[position] for position in positions]
        labels = f"{IMAGES_ROLE}-labels.npy"
        save_array(out / labels, np.array(classes))
        columns["label"] = pa.array(classes)
    with writing(out / ITEMS_FILE) as file:
        pq.write_table(pa.table(columns), file)
    entry = RoleEntry(rows=len(positions), dimensions=num_dimensions, shards=tuple(shard_names), labels=labels)
    save_manifest(out, {IMAGES_ROLE: entry})


def _list_bad(out: Path, bad: tuple[tuple[str, str], ...], skip: bool, num_images: int) -> None:
    """Write the list of bad images, if there are any; they are an error if they are not to be skipped, or all are bad."""
    if not bad:
        (out / BAD_FILE).unlink(missing_ok=True)
        return
    text = io.StringIO()
    csv.writer(text).writerows([("path", "why"), *bad])
    write_whole(out / BAD_FILE, text.getvalue())
    if not skip or len(bad) == num_images:
        shown = "; ".join(f"{name}: {reason}" for name, reason in bad[:NUM_SHOWN]) + ("; ..." if len(bad) > NUM_SHOWN else "")
        raise DataError(
            f"{len(bad)} of {num_images} images are bad ({shown}); {out / BAD_FILE} lists all: "
            + ("fix them; --skip-bad would leave none" if len(bad) == num_images else "fix them, or skip them with --skip-bad")
        )
