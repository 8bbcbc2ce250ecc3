"""Pack a raw folder into `images.arrow` (original bytes, memory-mapped later), `manifest.parquet` and `dataset.json`.

The result depends only on the raw files and the options, not on time, host or absolute paths: the same input gives the same
bytes with one version of pyarrow, which the manifest names. A target with the same images and rows is kept, whichever version packed it.
Files are written to a folder next to the target, synced to disk and renamed; a failure leaves the target unchanged. A target with any
other file is rejected, and no other file is ever removed. Images packed by an interrupted or refused attempt are not decoded again.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dml_core.data.readers.shared.archives import Progress
from dml_core.data.registry import parse_dataset
from dml_core.data.store.decode import decode_rgb
from dml_core.data.store.info import IMAGES_FILE, INFO_FILE, MANIFEST_FILE, DatasetInfo, verify_files, write_info
from dml_core.data.store.rows import Manifest, Row, role_counts
from dml_core.errors import DataError, StoreError
from dml_core.files import file_sha256

IMAGES_SCHEMA = pa.schema([pa.field("image", pa.binary(), nullable=False)])
MANIFEST_SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("path", pa.string()),
        ("label", pa.int64()),
        ("label_name", pa.string()),
        ("role", pa.string()),
        ("box", pa.list_(pa.float64())),
    ]
)
Check = Callable[[DatasetInfo], None]
_FILES = (IMAGES_FILE, MANIFEST_FILE, INFO_FILE)
_NUM_ROWS_PER_BATCH = 128
_NUM_MAGIC_BYTES = 8


def prepare(
    dataset_name: str, raw: Path, out: Path, options: Mapping[str, Any], progress: Progress | None = None, check: Check = lambda info: None
) -> DatasetInfo:
    """Read, check and pack a dataset; a packed dataset at `out` is replaced as a whole.

    Args:
        dataset_name: a name of the registry.
        raw: folder with the publisher's files.
        out: folder of the packed dataset.
        options: the dataset's options.
        progress: called with (images done, total images) during packing.
        check: called with the new content before it replaces another; if it raises an error, `out` stays, and a later attempt need not
            decode the images again.

    Raises:
        ConfigError: unknown dataset or option.
        DataError: raw files are missing or damaged; an unreadable image is named, never skipped.
        StoreError: `out` cannot be written, or holds files that `prepare` did not write.
    """
    dataset = parse_dataset(dataset_name, options)
    return pack(dataset_name, dataset.model_dump(mode="json"), dataset.read(raw), out, progress, check)


def pack(
    dataset_name: str,
    options: dict[str, Any],
    manifest: Manifest,
    out: Path,
    progress: Progress | None = None,
    check: Check = lambda info: None,
) -> DatasetInfo:
    """Write a manifest's images and rows as a packed dataset; the second half of `prepare`, with its errors."""
    out = Path(os.path.realpath(out))  # keep a link and replace its target
    partial = out.parent / f".{out.name}.partial"
    interrupted = out.parent / f".{out.name}.interrupted"
    for folder in (out, partial, _replaced(out)):
        _check_own(folder)
    try:
        _set_aside(partial, interrupted)
        partial.mkdir(parents=True)
        _write_images(manifest, partial / IMAGES_FILE, _salvaged_batches(interrupted), progress)
        _write_manifest(manifest.rows, partial / MANIFEST_FILE)
        info = DatasetInfo(
            name=dataset_name,
            options=options,
            roles=role_counts(manifest.rows),
            num_classes=len({row.label for row in manifest.rows}),
            images_sha256=file_sha256(partial / IMAGES_FILE),
            manifest_sha256=file_sha256(partial / MANIFEST_FILE),
        )
        write_info(info, partial)
        former = _same_content(out, info, partial)
        if former is None:
            check(info)
            _publish(partial, out)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)  # Arrow's own message is longer
        raise StoreError(f"{out}: cannot be written ({reason}); free space or choose another folder") from None
    finally:
        is_refused = isinstance(sys.exception(), DataError) and (partial / INFO_FILE).is_file()  # by `check`, all images being packed
        if not isinstance(sys.exception(), KeyboardInterrupt):
            with contextlib.suppress(OSError):
                interrupted.unlink(missing_ok=True)
                if not is_refused:
                    _remove(partial)
    return former or info


def _set_aside(partial: Path, interrupted: Path) -> None:
    """Keep the images of the interrupted attempt that had packed the most."""
    packed = partial / IMAGES_FILE
    if packed.is_file() and (not interrupted.is_file() or packed.stat().st_size > interrupted.stat().st_size):
        packed.replace(interrupted)
    _remove(partial)


def _salvaged_batches(interrupted: Path) -> Iterator[list[bytes]]:
    """Yield the images of complete record batches of an unfinished Arrow file, which is a stream after its magic bytes."""
    if not interrupted.is_file():
        return
    with pa.OSFile(str(interrupted)) as file:
        try:
            file.seek(_NUM_MAGIC_BYTES)
            for batch in pa.ipc.open_stream(file):
                yield batch["image"].to_pylist()
        except (pa.ArrowInvalid, OSError):
            return


def _write_images(manifest: Manifest, path: Path, salvaged: Iterator[list[bytes]], progress: Progress | None) -> None:
    """Write 128 images at a time to bound memory, with threads, because reading and decoding release the interpreter lock."""
    rows = manifest.rows
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, IMAGES_SCHEMA) as writer, ThreadPoolExecutor() as pool:
        for start in range(0, len(rows), _NUM_ROWS_PER_BATCH):
            batch = rows[start : start + _NUM_ROWS_PER_BATCH]
            known = next(salvaged, [])
            images = list(pool.map(lambda row, seen: _checked_bytes(manifest, row, seen), batch, chain(known, repeat(b""))))
            writer.write_table(pa.table([pa.array(images, pa.binary())], schema=IMAGES_SCHEMA))  # a batch per 2 GiB
            if progress:
                progress(start + len(batch), len(rows))


def _checked_bytes(manifest: Manifest, row: Row, already_checked: bytes) -> bytes:
    try:
        data = manifest.read_bytes(row)
        if not data or data != already_checked:
            decode_rgb(data)
    except ValueError as error:  # of the image, or of one to be resized
        raise DataError(f"{row.path}: cannot be decoded ({error}); restore or replace the file") from None
    return data


def _write_manifest(rows: list[Row], path: Path) -> None:
    """Write the rows; the publisher's class numbers, in order, become 0 to C-1 over the whole dataset."""
    indices = {label: index for index, label in enumerate(sorted({row.label for row in rows}))}
    columns = {
        "index": range(len(rows)),
        "path": [row.path for row in rows],
        "label": [indices[row.label] for row in rows],
        "label_name": [row.label_name for row in rows],
        "role": [row.role for row in rows],
        "box": [row.box for row in rows],
    }
    pq.write_table(pa.table(columns, schema=MANIFEST_SCHEMA), path)


def _same_content(out: Path, info: DatasetInfo, partial: Path) -> DatasetInfo | None:
    """Return the description of `out` if it has the images and rows of `partial`, else None; it is then kept: a run may be reading it.

    Its manifest may have other bytes, which name the version of pyarrow: the dataset's identity stays that of the first.
    """
    try:
        former = verify_files(out)
    except DataError:
        return None
    if former.model_copy(update={"manifest_sha256": info.manifest_sha256}) != info:
        return None
    return former if pq.read_table(out / MANIFEST_FILE).equals(pq.read_table(partial / MANIFEST_FILE)) else None


def _publish(partial: Path, out: Path) -> None:
    """Sync the files to disk, then replace the old folder by the new one; the old one stays if that fails."""
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    replaced = _replaced(out)
    _remove(replaced)
    if out.exists():
        out.rename(replaced)
    try:
        partial.rename(out)
    except OSError:
        if replaced.exists():
            replaced.rename(out)
        raise
    _remove(replaced)


def _replaced(out: Path) -> Path:
    return out.parent / f".{out.name}.replaced"


def _check_own(folder: Path) -> None:
    """Reject a path that holds anything that `prepare` does not write.

    Raises:
        StoreError: the path holds such a file; the message names the first one.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise StoreError(f"{folder}: is not a folder of packed data; move it away or choose another place")
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in _FILES or path.is_dir()) if folder.exists() else []
    if foreign:
        raise StoreError(f"{folder}: holds '{foreign[0]}', which dml data prepare did not write; move it away or choose another place")


def _remove(folder: Path) -> None:
    """Remove the files that `prepare` writes, then their folder; fail if it holds anything else."""
    if folder.exists():
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
