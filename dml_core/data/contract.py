"""What a dataset module provides: its options, and how a raw folder becomes a list of rows.

A dataset is a small frozen configuration class. Its fields are the options a person may set in `params.yaml`; `rows` reads the
publisher's own files; `read` adds the checks that hold for every dataset and gives a `Manifest`, which `prepare` packs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal

from dml_core.config import Config
from dml_core.errors import DataError

Role = Literal["train", "test", "query", "gallery"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Row:
    """One image of a dataset.

    Attributes:
        path: unique name, relative to the raw folder, with forward slashes.
        label: the publisher's class number; only its order matters.
        label_name: the publisher's class name.
        role: "train", "test" or (In-shop) "query", "gallery"; classes are disjoint between training and the rest.
        box: (left, top, right, bottom) in pixels of the original image, right and bottom exclusive, or None.
    """

    path: str
    label: int
    label_name: str
    role: Role
    box: Box | None = None


@dataclass(frozen=True)
class Manifest:
    """All rows of a dataset in packing order, and how the encoded bytes of one of them are read."""

    rows: list[Row]
    read_bytes: Callable[[Row], bytes]


@dataclass(frozen=True)
class Counts:
    """Images and classes of one role."""

    num_images: int
    num_classes: int


class DatasetConfig(Config):
    """Base of every dataset: options as fields, reading as methods.

    Attributes:
        how_to_get: what a person must do by hand where the raw files are missing; one line.
        single_image_classes: the publisher's training part has classes with one image (In-shop's has).
    """

    how_to_get: ClassVar[str] = "put the raw files there by hand"
    single_image_classes: ClassVar[bool] = False

    def rows(self, raw: Path) -> list[Row]:
        """Read the publisher's annotation files under `raw`.

        Raises:
            DataError: a file is missing, damaged, or names something that does not exist.
        """
        raise TypeError(f"{type(self).__name__} does not implement rows")

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """How the encoded bytes of one row are read; by default the row's path is a file under `raw`."""
        return lambda row: read_file(raw / row.path)

    def materialise(self, raw: Path) -> None:
        """Make sure that the raw files are in `raw`, never overwriting what is there.

        Raises:
            DataError: they are not, and only a person can fetch them.
        """
        if not raw.is_dir() or not any(raw.iterdir()):
            raise DataError(f"{raw}: no raw files; {self.how_to_get}")

    def read(self, raw: Path) -> Manifest:
        """The checked manifest of the raw folder.

        Raises:
            DataError: as `rows`, or the rows break a rule that holds for every dataset, or the published counts.
        """
        if not raw.is_dir():
            raise DataError(f"{raw}: no such folder; {self.how_to_get}")
        rows = self.rows(raw)
        check_rows(rows, raw, self.single_image_classes)
        return Manifest(rows, self.reader(raw))


class OfficialDataset(DatasetConfig):
    """A published dataset: images and classes per role are checked against the published counts.

    Attributes:
        published_counts: False for a tree in the official layout that is not the official archive (a generated one).
    """

    published: ClassVar[Mapping[str, Counts]] = {}
    published_counts: bool = True

    def read(self, raw: Path) -> Manifest:
        """As `DatasetConfig.read`, with the published counts checked."""
        manifest = super().read(raw)
        if self.published_counts:
            check_published(manifest.rows, self.published, raw)
        return manifest


def read_file(path: Path) -> bytes:
    """Bytes of one image file.

    Raises:
        DataError: the file that an annotation names is missing, unreadable or empty.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: the annotations name this image but there is no such file; unpack the archive again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions and disk") from None
    if not data:
        raise DataError(f"{path}: the file is empty; unpack the archive again")
    return data


def read_lines(path: Path) -> list[str]:
    """Non-empty lines of an annotation file, without line ends.

    Raises:
        DataError: the file is missing or is not UTF-8 text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: missing annotation file; unpack the archive again") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; unpack the archive again") from None
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def read_numbers(texts: Sequence[str], path: Path) -> list[float]:
    """Columns of an annotation file as numbers.

    Raises:
        DataError: one of them is not a number.
    """
    try:
        return [float(text) for text in texts]
    except ValueError:
        raise DataError(f"{path}: '{' '.join(texts)}' should be numbers; unpack the archive again") from None


def check_no_gap(labels: set[int], where: Path) -> None:
    """Class numbers that a publisher counts from 1 have no gap.

    Raises:
        DataError: the first missing number.
    """
    missing = next((number for number in range(1, len(labels) + 1) if number not in labels), None)
    if missing is not None:
        raise DataError(f"{where}: class numbers have a gap, {missing} is missing; unpack the archive again")


def check_no_empty(announced: set[str], found: set[str], where: Path) -> None:
    """Every class that a publisher names has an image.

    Raises:
        DataError: the first class, by name, that has none.
    """
    empty = sorted(announced - found)
    if empty:
        raise DataError(f"{where}: class '{empty[0]}' has no images; unpack the archive again")


def role_counts(rows: list[Row]) -> dict[str, Counts]:
    """Images and classes per role, in order of first appearance."""
    labels: dict[str, list[int]] = {}
    for row in rows:
        labels.setdefault(row.role, []).append(row.label)
    return {role: Counts(len(found), len(set(found))) for role, found in labels.items()}


def check_rows(rows: list[Row], where: Path, single_image_classes: bool) -> None:
    """Rules of every dataset: safe unique paths, one name per class, disjoint classes, a positive for every image.

    Raises:
        DataError: the first rule that is broken, and by which image or class.
    """
    if not rows:
        raise DataError(f"{where}: the dataset has no images")
    _check_paths(rows, where)
    _check_classes(rows, where)
    _check_positives(rows, where, single_image_classes)


def check_published(rows: list[Row], published: Mapping[str, Counts], where: Path) -> None:
    """Compare the counts of every role with the published ones.

    Raises:
        DataError: a role has another number of images or classes.
    """
    found = role_counts(rows)
    for role, expected in published.items():
        counts = found.get(role, Counts(0, 0))
        if counts != expected:
            raise DataError(
                f"{where}: {role} has {counts.num_images} images of {counts.num_classes} classes, published are "
                f"{expected.num_images} of {expected.num_classes}; unpack the official archive again, or set published_counts: false"
            )


def _check_paths(rows: list[Row], where: Path) -> None:
    path, times = Counter(row.path for row in rows).most_common(1)[0]
    if times > 1:
        raise DataError(f"{where}: image '{path}' is listed {times} times; remove the duplicates")
    for row in rows:
        pure = PurePosixPath(row.path)
        if pure.is_absolute() or ".." in pure.parts:
            raise DataError(f"{where}: image path '{row.path}' leads out of the folder; paths must be relative to it")
        if not row.path.isprintable():
            raise DataError(f"{where}: image path {row.path!r} is not printable UTF-8; rename the file")


def _check_classes(rows: list[Row], where: Path) -> None:
    names: dict[int, str] = {}
    numbers: dict[str, int] = {}
    parts: dict[int, bool] = {}
    for row in rows:
        if names.setdefault(row.label, row.label_name) != row.label_name:
            raise DataError(f"{where}: class {row.label} has two names, '{names[row.label]}' and '{row.label_name}'")
        if numbers.setdefault(row.label_name, row.label) != row.label:
            raise DataError(f"{where}: two classes have the name '{row.label_name}'; names must tell classes apart")
        if parts.setdefault(row.label, row.role == "train") != (row.role == "train"):
            raise DataError(f"{where}: class '{row.label_name}' is in train and in {row.role}; classes must be disjoint")


def _check_positives(rows: list[Row], where: Path, single_image_classes: bool) -> None:
    names = {row.label: row.label_name for row in rows}
    sizes = Counter((row.role, row.label) for row in rows)
    for (role, label), size in sizes.items():
        if role == "query" and ("gallery", label) not in sizes:
            raise DataError(f"{where}: class '{names[label]}' is in query but not in gallery; its images have nothing to find")
        if size == 1 and (role == "test" or (role == "train" and not single_image_classes)):
            raise DataError(f"{where}: class '{names[label]}' has one image in {role}; at least two are needed")
