"""In-shop Clothes Retrieval of DeepFashion (Liu et al., 2016): train, query and gallery; every query item is in the gallery."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from dml_core.data.readers.shared.annotations import read_file, read_lines, read_numbers
from dml_core.data.readers.shared.archives import Archive
from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.readers.shared.places import find_place
from dml_core.data.store.rows import Box, Counts, Row, as_role
from dml_core.errors import DataError

_PARTITIONS = ("Eval/list_eval_partition.txt", "Anno/list_eval_partition.txt", "list_eval_partition.txt")
_BOXES = ("Anno/list_bbox_inshop.txt", "list_bbox_inshop.txt")
_IMAGES, _LARGE_IMAGES = ("Img/img", "img"), ("Img/img_highres", "img_highres")
_NUM_PARTITION_COLUMNS = 3
_NUM_BOX_COLUMNS = 7


class Inshop(OfficialDataset):
    """The official package: `Eval/list_eval_partition.txt`, `Anno/list_bbox_inshop.txt`, `img.zip` unpacked in `Img/` or next to them.

    The raw folder may be the package's or contain it, one or two levels down (`In-shop Clothes Retrieval Benchmark/`); both lists may be
    next to `img/` or in `Anno/`.

    Attributes:
        boxes: False for the high-resolution images (`img_highres/`), which the published boxes do not fit, or if the box list is missing.
    """

    published: ClassVar[Mapping[str, Counts]] = {
        "train": Counts(25_882, 3_997),
        "query": Counts(14_218, 3_985),
        "gallery": Counts(12_612, 3_985),
    }
    archives: ClassVar[tuple[Archive, ...]] = (Archive("img.zip", "img"), Archive("Img/img.zip", "Img/img"))
    landmarks: ClassVar[tuple[str, ...]] = _PARTITIONS
    how_to_get: ClassVar[str] = (
        "get In-shop Clothes Retrieval (Eval, Anno and img.zip) from mmlab.ie.cuhk.edu.hk/projects/DeepFashion.html; unpack it"
    )
    single_image_classes: ClassVar[bool] = True
    boxes: bool = True

    def rows(self, raw: Path) -> list[Row]:
        """Return rows in the partition file's order; item ids are the class names, their numbers the labels."""
        folder = self.folder(raw)
        boxes = _read_boxes(find_place(folder, _BOXES) or folder / _BOXES[0]) if self.boxes else {}
        path = find_place(folder, _PARTITIONS) or folder / _PARTITIONS[0]
        rows = []
        for image, item, status in _read_table(path, _NUM_PARTITION_COLUMNS):
            number, role = item.removeprefix("id_"), as_role(status)
            if self.boxes and image not in boxes:
                raise DataError(f"{raw}: '{image}' has no box in list_bbox_inshop.txt; unpack it again, or set boxes: false")
            if not number.isdecimal():
                raise DataError(f"{path}: item '{item}' is not of the form id_00000001")
            if role is None or role == "test":
                raise DataError(f"{path}: evaluation status '{status}' is none of train, query, gallery")
            rows.append(Row(image, int(number), item, role, boxes.get(image)))
        return rows

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """Return a reader of image paths that start with `img/`, which is in `Img/` in the official package.

        Raises:
            DataError: no image folder, or only the high-resolution images although boxes are requested.
        """
        folder = self.folder(raw)
        images, large = find_place(folder, _IMAGES), find_place(folder, _LARGE_IMAGES)
        if images is None and large is not None and self.boxes:
            raise DataError(f"{large}: these are the large images, which the published boxes do not fit; get img.zip, or set boxes: false")
        found = images or large
        if found is None:
            raise DataError(f"{folder}: the lists are there and the images are not (Img/img); unpack img.zip there")
        return lambda row: read_file(found / row.path.removeprefix("img/"))


def _read_table(path: Path, num_columns: int) -> list[list[str]]:
    """Return the lines after count and header, as columns; the count must match the number of lines."""
    lines = [line.split() for line in read_lines(path)]
    if len(lines) < 2 or lines[0] != [str(len(lines) - 2)]:
        raise DataError(f"{path}: {max(len(lines) - 2, 0)} lines do not match the count in the first line; unpack the archive again")
    for number, columns in enumerate(lines[2:], start=3):
        if len(columns) != num_columns:
            raise DataError(f"{path}: line {number} does not have {num_columns} columns; unpack the archive again")
    return lines[2:]


def _read_boxes(path: Path) -> dict[str, Box]:
    boxes: dict[str, Box] = {}
    for image, _, _, *corners in _read_table(path, _NUM_BOX_COLUMNS):
        left, top, right, bottom = read_numbers(corners, path)
        boxes[image] = (left, top, right, bottom)
    return boxes
