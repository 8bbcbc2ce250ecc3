"""MNIST-like datasets: four IDX files of 28x28 grayscale images, split by class instead of by the publisher's train and test files.

Both parts of the publisher's classification split are pooled; classes 0 to 4 train, 5 to 9 test.
"""

import io
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from pydantic import Field

from dml_core.data.contract import DatasetConfig
from dml_core.data.idx import find_idx, read_idx
from dml_core.data.rows import Role, Row
from dml_core.errors import DataError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_STEMS = {part: (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")}
_NUM_TRAIN_CLASSES = 5


class IdxDataset(DatasetConfig):
    """Options of an MNIST-like dataset.

    Attributes:
        folder: where the IDX files are ("auto": a Debian package's folder, else torchvision downloads them).
        images_per_class: keep the first so many of each class, for a quick run; None keeps all.
        published_counts: the files must hold 70,000 images, 7,000 of each class where the publisher says so.
    """

    class_names: ClassVar[tuple[str, ...]]
    torchvision_class: ClassVar[str]
    debian_folder: ClassVar[str] = ""
    num_images: ClassVar[int] = 70_000

    folder: str = "auto"
    images_per_class: int | None = Field(default=None, ge=2)
    published_counts: bool = True

    def rows(self, raw: Path) -> list[Row]:
        """Rows in the files' order, the publisher's training file first; paths are `train/00000.png`."""
        labels = [(part, number, int(label)) for part in _STEMS for number, label in enumerate(_pair(raw, part)[1])]
        if self.published_counts and len(labels) != self.num_images:
            raise DataError(f"{raw}: {len(labels)} images, published are {self.num_images}; fetch the files again")
        if labels and max(label for *_, label in labels) >= len(self.class_names):
            raise DataError(f"{raw}: a label is above {len(self.class_names) - 1}; these are not the files of this dataset")
        kept: Counter[int] = Counter()
        rows = []
        for part, number, label in labels:
            kept[label] += 1
            if self.images_per_class is None or kept[label] <= self.images_per_class:
                role: Role = "train" if label < _NUM_TRAIN_CLASSES else "test"
                rows.append(Row(f"{part}/{number:05d}.png", label, self.class_names[label], role))
        return rows

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """The raw pixels, losslessly as PNG."""
        pixels = {part: _pair(raw, part)[0] for part in _STEMS}

        def read(row: Row) -> bytes:
            part, name = row.path.split("/")
            return _png(pixels[part][int(name.removesuffix(".png"))])

        return read

    def materialise(self, raw: Path) -> None:
        """Copy the four files from where they are found; what is in `raw` already stays.

        Raises:
            DataError: they are in none of the places, and could not be downloaded.
        """
        if _has_files(raw):
            return
        found = self.locate_raw()
        raw.mkdir(parents=True, exist_ok=True)
        for path in _files(found):
            if find_idx(raw, path.name.removesuffix(".gz")) is None:
                _copy(path, raw / path.name)

    def locate_raw(self, root: Path = Path("/")) -> Path:
        """The folder with the IDX files: the one given, else Debian's package folder under `root`, else a fresh download.

        Raises:
            DataError: no place has them; the line names those that were tried.
        """
        candidates = [] if self.folder == "auto" else [Path(self.folder)]
        if self.debian_folder:
            candidates.append(root / "usr/share/datasets" / self.debian_folder)
        for candidate in candidates:
            if _has_files(candidate):
                return candidate
        tried = ", ".join(str(candidate) for candidate in candidates) or "no folder"
        return self._download(tried)

    def _download(self, tried: str) -> Path:
        from torchvision import datasets

        target = Path.home() / ".cache" / "dml-repro"
        try:
            for train in (True, False):
                getattr(datasets, self.torchvision_class)(str(target), train=train, download=True)
        except (OSError, RuntimeError) as error:
            problem = str(error).splitlines()[0]
            raise DataError(f"no IDX files in {tried}, and no download ({problem}); set the option 'folder' to where they are") from None
        return target / self.torchvision_class / "raw"


def _files(folder: Path) -> list[Path]:
    """The four files, gzipped or not, as far as they are there."""
    found = [find_idx(folder, stem) for pair in _STEMS.values() for stem in pair]
    return [path for path in found if path is not None]


def _has_files(folder: Path) -> bool:
    return len(_files(folder)) == 2 * len(_STEMS)


def _pair(raw: Path, part: str) -> tuple[Bytes, Bytes]:
    """Images (N, height, width) and labels (N,) of one part of the publisher's split."""
    paths = [find_idx(raw, stem) for stem in _STEMS[part]]
    missing = [stem for stem, path in zip(_STEMS[part], paths, strict=True) if path is None]
    if missing:
        raise DataError(f"{raw}: '{missing[0]}' (or .gz) is missing; run `dml data fetch` or put it there")
    images, labels = (read_idx(path) for path in paths if path is not None)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(f"{raw}: {part} has images {images.shape} and labels {labels.shape}; the files do not belong together")
    return images, labels


def _png(pixels: Bytes) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()


def _copy(source: Path, target: Path) -> None:
    """Whole or not at all."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.copyfile(source, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
