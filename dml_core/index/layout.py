"""The folder of an index: `index.json` describes it and names the other files, with their hashes; named files never change.

A change writes new files, then replaces `index.json`: updates are atomic, and a process that has the old files open keeps them. Every file
is verified by its SHA-256 when the index is opened.

    index.json                  description of the index, with its own hash
    vectors-<version>.f32       (N, D) float32, row after row, nothing else; of unit length for cosine
    items-<version>.arrow       name, class name and thumbnail of each row
    approximate-<version>.faiss optional approximate index of the same rows
    .lock                       held by the process that changes it
"""

import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar
from uuid import uuid4

from pydantic import Field, ValidationError

from dml_core.config import Config
from dml_core.errors import ConfigError, StoreError
from dml_core.evaluation.config import Metric, Positive
from dml_core.evaluation.retrieval.approximate import ApproximateConfig
from dml_core.files import LEFTOVER, alone, file_sha256, read_regular, sealed, unsealed, write_errors, writing

FORMAT: Literal[3] = 3  # format 2 had no hash of the network's weights
REMEDY = "build the index again with --force"
INFO_FILE, LOCK_FILE = "index.json", ".lock"
VECTORS, ITEMS, APPROXIMATE = FILES = ("vectors-{}.f32", "items-{}.arrow", "approximate-{}.faiss")  # names, with the version
VERSION = "[0-9a-f]{12}"
OWN_NAME = re.compile("|".join([*(file.replace(".", r"\.").format(VERSION) for file in FILES), LEFTOVER]))
THUMBNAIL_PIXELS = 160  # longer side
Kind = Literal["exact", "ivf", "pq", "hnsw"]
ValueT = TypeVar("ValueT")
logger = logging.getLogger(__name__)


class MeasuredRecall(Config):
    """Recall of an approximate index for the exact nearest neighbours; ties at the last one count as found.

    Attributes:
        recalls: k -> share of the exact nearest k among the k found.
        num_queries: number of items used as queries, drawn by `seed`; each is excluded from its own neighbours.
        seed: seed of the draw.
    """

    recalls: dict[int, float]
    num_queries: int
    seed: int

    def __str__(self) -> str:
        shown = ", ".join(f"{100 * recall:.1f} % @{k}" for k, recall in self.recalls.items())
        return f"finds {shown} of the exact nearest neighbours ({self.num_queries} items looked for)"


class IndexInfo(Config):
    """Contents of `index.json`.

    Attributes:
        model_identity: identity of the embeddings' network, as `TrainedModel` has it.
        model_source: display name of the model when the index was built.
        weights_sha256: `TrainedModel.weights_sha256`; None also if the embeddings came without it, and before format 3.
        metric: metric of the search.
        num_items, num_dimensions: N and D.
        kind: "exact", or the kind of approximation.
        reason: reason for the kind, if it was chosen automatically.
        approximation: settings of an approximate index.
        found: its measured recall; None for an exact index or a single item.
        version: part of the other files' names.
        files_sha256: name of each other file -> its hash.
    """

    format: Literal[2, 3] = FORMAT
    model_identity: str
    model_source: str | None = None
    weights_sha256: str | None = None
    metric: Metric = "cosine"
    num_items: Positive
    num_dimensions: Positive
    kind: Kind = "exact"
    reason: str | None = None
    approximation: ApproximateConfig | None = None
    found: MeasuredRecall | None = None
    version: str = Field(pattern=f"^{VERSION}$")
    files_sha256: dict[str, str] = {}

    def path(self, folder: Path, file: str) -> Path:
        """Return the path of its `VECTORS`, `ITEMS` or `APPROXIMATE`."""
        return folder / file.format(self.version)

    def files(self, folder: Path) -> list[Path]:
        """Return the path of every file that `index.json` names."""
        return [self.path(folder, file) for file in FILES if file != APPROXIMATE or self.kind != "exact"]


def read_info(folder: Path) -> IndexInfo:
    """Read the description of the index in a folder.

    Raises:
        ConfigError: no index there.
        StoreError: the description is damaged, or of format 1 or a newer one.
    """
    path = folder / INFO_FILE
    try:
        values = unsealed(read_regular(path), path, FORMAT, REMEDY)
        return IndexInfo.model_validate_json(json.dumps(values))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder}: no index there; build one with `dml index MODEL IMAGES -o {folder}`") from None
    except ValidationError:
        raise StoreError(f"{path}: damaged; {REMEDY}") from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror or error}); {REMEDY}") from None


def verify(folder: Path, info: IndexInfo) -> None:
    """Compare every file of an index with its hash.

    Raises:
        FileNotFoundError: a file is missing.
        StoreError: a file is damaged or cannot be read.
    """
    files = info.files(folder)
    try:
        hashes = _hashes(files)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{error.filename or folder}: cannot be read ({error.strerror or error}); {REMEDY}") from None
    for path in files:
        if hashes[path.name] != info.files_sha256.get(path.name):
            raise StoreError(f"{path}: damaged (SHA-256 differs); {REMEDY}")


def check_place(folder: Path, replace: bool) -> None:
    """Reject a folder that has an index, unless it is to be replaced, or any other file.

    Raises:
        ConfigError: it has.
    """
    if (folder / INFO_FILE).exists() and not replace:
        raise ConfigError(f"{folder}: has an index already; add to it with `dml index add`, or replace it with --force")
    strange = {path.name for path in folder.iterdir()} - {INFO_FILE, LOCK_FILE, *(path.name for path in _index_files(folder))}
    strange = {name for name in strange if not name.startswith(".nfs")}  # NFS keeps deleted files that a process has open
    if strange:
        raise ConfigError(f"{folder}: not empty ({min(strange)}); name a separate folder for the index")


@contextmanager
def changing(folder: Path) -> Iterator[str]:
    """Let one process at a time change the index, and yield a version for its new files; they are removed if they do not become the index.

    Other processes wait. The system releases the lock of a process that dies.

    Raises:
        StoreError: the folder cannot be written.
        OSError: as the caller's batches raised it (`from_caller`).
    """
    version, lock = uuid4().hex[:12], folder / LOCK_FILE
    if lock.is_file() and _is_held(lock):
        logger.warning("%s: another process changes this index; this one waits for it", folder)
    try:
        with write_errors(f"{folder}: the index", "free or change the place"), alone(lock):
            try:
                yield version
            except BaseException:
                if not _is_current(folder, version):
                    _remove(folder, lambda name: version in name)
                raise
    except _CallerError as error:
        raise error.error from None


def _is_held(lock: Path) -> bool:
    """Return whether a process holds a lock of `alone`: that is only for a message."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it cannot be opened, which `alone` tells
        return False
    return False


class _CallerError(Exception):
    """An OSError of the caller's batches, such as that of an image or a server: it says nothing about the index's folder."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


def from_caller(values: Iterable[ValueT]) -> Iterator[ValueT]:
    """Yield the caller's values; `changing` then raises their OSErrors unchanged."""
    try:
        yield from values
    except OSError as error:
        raise _CallerError(error) from error


def commit(folder: Path, info: IndexInfo) -> IndexInfo:
    """Make `info` the folder's index, atomically, and remove the files of earlier versions. The new files must be complete.

    Returns:
        `info` as written, with the hashes of its files.
    """
    files = info.files(folder)
    for path in files:
        _to_disk(path)
    info = info.model_copy(update={"format": FORMAT, "files_sha256": _hashes(files)})
    with writing(folder / INFO_FILE) as file:
        file.write(sealed(info.model_dump(mode="json")).encode())
    _to_disk(folder)
    _remove(folder, lambda name: info.version not in name)
    return info


def _index_files(folder: Path) -> list[Path]:
    """Return the files in a folder whose names are those of an index's files, of any version, except `index.json` and the lock."""
    return [path for path in folder.iterdir() if OWN_NAME.fullmatch(path.name)]


def _is_current(folder: Path, version: str) -> bool:
    try:
        return version.encode() in read_regular(folder / INFO_FILE)
    except OSError:
        return False


def _remove(folder: Path, unwanted: Callable[[str], bool]) -> None:
    for path in _index_files(folder):
        if unwanted(path.name):
            with suppress(OSError):  # the next change tries again
                path.unlink()


def _hashes(files: Sequence[Path]) -> dict[str, str]:
    """Return name -> SHA-256 of files, hashed in parallel."""
    with ThreadPoolExecutor() as pool:
        return dict(zip((path.name for path in files), pool.map(file_sha256, files), strict=True))


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
