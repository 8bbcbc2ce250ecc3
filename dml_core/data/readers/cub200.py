"""CUB-200-2011: 11,788 images of 200 bird species (Wah et al., 2011), each with a bounding box.

The DML split is by class: the first half of the classes is for training, the second for test (5,864 and 5,924 images). The archive's
`train_test_split.txt` splits every class for classification and is never read.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from dml_core.data.readers.shared.annotations import read_file, read_lines, read_numbers
from dml_core.data.readers.shared.archives import Archive
from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.store.rows import Box, Counts, Role, Row
from dml_core.errors import DataError

FOLDER = "CUB_200_2011"


class Cub200(OfficialDataset):
    """The official archive `CUB_200_2011.tgz`, unpacked: `CUB_200_2011/{images.txt, classes.txt, images/, ...}`.

    The raw folder may be that folder or contain it, one or two levels down (Kaggle's copies).
    """

    published: ClassVar[Mapping[str, Counts]] = {"train": Counts(5_864, 100), "test": Counts(5_924, 100)}
    archives: ClassVar[tuple[Archive, ...]] = (
        Archive(
            "CUB_200_2011.tgz",
            FOLDER,
            md5="97eceeb196236b17998738112f37df78",
            url="https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
            num_bytes=1_150_585_339,
        ),
    )
    landmarks: ClassVar[tuple[str, ...]] = ("images.txt", "classes.txt")
    how_to_get: ClassVar[str] = (
        "download CUB_200_2011.tgz (md5 97eceeb196236b17998738112f37df78) from https://data.caltech.edu/records/65de6-vp158; unpack it"
    )

    def rows(self, raw: Path) -> list[Row]:
        """Return rows in the order of `images.txt`; class numbers are the publisher's, from 1."""
        folder = self.folder(raw)
        names = {int(number): name for number, name in _table(folder / "classes.txt", 2)}
        missing = next((number for number in range(1, len(names) + 1) if number not in names), None)
        if missing is not None:
            raise DataError(f"{folder / 'classes.txt'}: class numbers have a gap, {missing} is missing; unpack the archive again")
        labels = folder / "image_class_labels.txt"
        classes = {image: int(read_numbers([number], labels)[0]) for image, number in _table(labels, 2)}
        boxes = {image: _box(numbers, folder) for image, *numbers in _table(folder / "bounding_boxes.txt", 5)}
        rows = []
        for image, path in _table(folder / "images.txt", 2):
            if image not in classes or image not in boxes:
                raise DataError(f"{folder}: image {image} ('{path}') has no class or no box; unpack the archive again")
            if classes[image] not in names:
                raise DataError(f"{folder}: image {image} ('{path}') has class {classes[image]}, which classes.txt does not name")
            number = classes[image]
            role: Role = "train" if number <= len(names) // 2 else "test"
            rows.append(Row(path, number, names[number], role, boxes[image]))
        return rows

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """Return a reader of image paths relative to the archive's `images` folder."""
        images = self.folder(raw) / "images"
        if not images.is_dir():
            raise DataError(f"{images}: the annotations are there and this folder of images is not; {self.how_to_get}")
        return lambda row: read_file(images / row.path)


def _table(path: Path, num_columns: int) -> list[list[str]]:
    """Return lines of space-separated columns; the last column may contain spaces."""
    lines = [line.split(maxsplit=num_columns - 1) for line in read_lines(path)]
    for number, columns in enumerate(lines, start=1):
        if len(columns) != num_columns or not columns[0].isdecimal():
            raise DataError(f"{path}: line {number} does not have {num_columns} columns beginning with a number")
    return lines


def _box(numbers: list[str], folder: Path) -> Box:
    """Convert x, y, width, height to (left, top, right, bottom)."""
    left, top, width, height = read_numbers(numbers, folder / "bounding_boxes.txt")
    return left, top, left + width, top + height
