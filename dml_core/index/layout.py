"""The folder of an index: `index.json` says what it is and names the other files, which are never changed once it names them.

A change writes new files beside the old, and comes true when a new `index.json` takes the place of the old one: who is killed before
that has changed nothing, and who has the old files open goes on reading them.

    index.json                  what it is
    vectors-<version>.f32       (N, D) float32, row after row, nothing else; of unit length where the metric is cosine
    items-<version>.arrow       name, class name and thumbnail of each row
    approximate-<version>.faiss an approximate index of the same rows, where there is one
    .lock                       of those that change it
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from dml_core.config import Config
from dml_core.errors import ConfigError, StoreError
from dml_core.evaluation.approximate import ApproximateConfig
from dml_core.evaluation.config import Metric, Positive

INFO_FILE, LOCK_FILE = "index.json", ".lock"
FILE_PATTERNS = ("vectors-*.f32", "items-*.arrow", "approximate-*.faiss", "index.json.*")
Kind = Literal["exact", "ivf", "pq", "hnsw"]


class Found(Config):
    """What an approximate index finds of the exact nearest neighbours, ties at the last one counting as found.

    Attributes:
        recalls: k -> share of the exact nearest k that are among the k found.
        num_queries: items that were looked for, drawn by `seed`; each is left out of its own neighbours.
        seed: of the draw.
    """

    recalls: dict[int, float]
    num_queries: int
    seed: int

    def __str__(self) -> str:
        shown = ", ".join(f"{100 * recall:.1f} % @{k}" for k, recall in self.recalls.items())
        return f"finds {shown} of the exact nearest neighbours ({self.num_queries} items looked for)"


class IndexInfo(Config):
    """`index.json`.

    Attributes:
        model_identity: of the train step that made the network of the embeddings.
        model_source: what the model was called when the index was built, for people.
        metric: what "nearer" means.
        num_items, num_dimensions: N and D.
        kind: "exact", or how it approximates.
        reason: why that kind, where it was chosen by itself.
        approximation: settings of an approximate one.
        found: what that costs; None for an exact one, and for one of a single item.
        version: in the names of the other files.
    """

    format: Literal[1] = 1
    model_identity: str
    model_source: str | None = None
    metric: Metric = "cosine"
    num_items: Positive
    num_dimensions: Positive
    kind: Kind = "exact"
    reason: str | None = None
    approximation: ApproximateConfig | None = None
    found: Found | None = None
    version: str

    def vectors(self, folder: Path) -> Path:
        """The file of the vectors."""
        return folder / f"vectors-{self.version}.f32"

    def items(self, folder: Path) -> Path:
        """The file of the items."""
        return folder / f"items-{self.version}.arrow"

    def approximate(self, folder: Path) -> Path:
        """The file of the approximate index, where there is one."""
        return folder / f"approximate-{self.version}.faiss"


def read_info(folder: Path) -> IndexInfo:
    """What the index of a folder is.

    Raises:
        ConfigError: no index there.
        StoreError: damaged, or of another version of this program.
    """
    path = folder / INFO_FILE
    try:
        return IndexInfo.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder}: no index there; build one with `dml index MODEL IMAGES -o {folder}`") from None
    except (ValidationError, ValueError):
        raise StoreError(f"{path}: damaged, or of another version of this program; build the index anew") from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None


def commit(folder: Path, info: IndexInfo) -> None:
    """Make `info` what the folder is, in one step, and remove the files of what it was. The new files must be complete."""
    for path in (info.vectors(folder), info.items(folder), info.approximate(folder)):
        if path.exists():
            _to_disk(path)
    beside = folder / f"{INFO_FILE}.{info.version}"
    beside.write_text(info.model_dump_json(indent=1) + "\n", encoding="utf-8")
    _to_disk(beside)
    beside.replace(folder / INFO_FILE)
    _to_disk(folder)
    sweep(folder, info.version)


def sweep(folder: Path, version: str | None) -> None:
    """Remove the files of every version but this one: what is outdated, and what somebody left who was interrupted."""
    for pattern in FILE_PATTERNS:
        for path in folder.glob(pattern):
            if version is None or version not in path.name:
                path.unlink(missing_ok=True)


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """One at a time inside, of all processes; the others wait. The system lets the lock go with its holder.

    Raises:
        StoreError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK_FILE).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise StoreError(f"{folder}: the index cannot be written ({error.strerror or error}); free or change the place") from None


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
