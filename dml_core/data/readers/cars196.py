"""Cars196: 16,185 images of 196 car models (Krause et al., 2013), with a bounding box each; classes 1 to 98 train, the rest test.

Three layouts are in circulation and the original links are dead, so the folder's own files decide which one is read:

- "annos": `cars_annos.mat` and `car_ims/000001.jpg`;
- "devkit": `devkit/cars_{train,test}_annos*.mat`, `cars_train/00001.jpg`, `cars_test/00001.jpg`;
- "folders": `anno_train.csv`, `anno_test.csv`, `names.csv` and `car_data/car_data/{train,test}/<class>/00001.jpg`.

Each of them carries a classification split that mixes all classes; both parts are pooled and it is never used. Box corners count
from 1 and are inclusive.
"""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from dml_core.data.readers.shared.annotations import read_lines, read_numbers
from dml_core.data.readers.shared.archives import Archive
from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.readers.shared.rules import check_no_empty, check_no_gap
from dml_core.data.store.rows import Counts, Role, Row
from dml_core.errors import DataError

_BOX_FIELDS = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
_DEVKIT_FILES = {"cars_train": "cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}
_NUM_CSV_COLUMNS = 6
Annotation = tuple[str, list[float], int]


class Cars196(OfficialDataset):
    """A folder in any of the three layouts."""

    published: ClassVar[Mapping[str, Counts]] = {"train": Counts(8_054, 98), "test": Counts(8_131, 98)}
    archives: ClassVar[tuple[Archive, ...]] = (
        Archive("car_ims.tgz", "car_ims", md5="d5c8f0aa497503f355e17dc7886c3f14"),
        Archive("cars_annos.mat", "cars_annos.mat", md5="b407c6086d669747186bd1d764ff9dbc"),
    )
    how_to_get: ClassVar[str] = (
        "the official links are dead; put car_ims and cars_annos.mat, or the devkit with cars_train and cars_test, or Kaggle's copy there"
    )

    def rows(self, raw: Path) -> list[Row]:
        """Rows in the order of the annotation files, training file first; class numbers are the publisher's, from 1."""
        names, annotations = _read(raw)
        labels = {label for *_, label in annotations}
        check_no_gap(labels, raw)
        if max(labels, default=0) > len(names):
            raise DataError(f"{raw}: an image has class {max(labels)}, but only {len(names)} classes have names; get the files again")
        check_no_empty(set(names), {names[label - 1] for label in labels}, raw)
        rows = []
        for path, (left, top, right, bottom), label in annotations:
            role: Role = "train" if label <= len(names) // 2 else "test"
            rows.append(Row(path, label, names[label - 1], role, (left - 1, top - 1, right, bottom)))
        return rows


def _read(raw: Path) -> tuple[list[str], list[Annotation]]:
    """Class names by number, and annotations, of whichever layout the folder has."""
    if (raw / "cars_annos.mat").is_file():
        return _read_annos(raw)
    if (raw / "devkit").is_dir():
        return _read_devkit(raw)
    if (raw / "names.csv").is_file():
        return _read_folders(raw)
    raise DataError(f"{raw}: none of cars_annos.mat, devkit/ and names.csv is there; {Cars196.how_to_get}")


def _read_annos(raw: Path) -> tuple[list[str], list[Annotation]]:
    path = raw / "cars_annos.mat"
    values = _read_mat(path)
    annotations = [_annotation(record, "relative_im_path", "", path) for record in _records(values, path)]
    return _names(values, path), annotations


def _read_devkit(raw: Path) -> tuple[list[str], list[Annotation]]:
    annotations = []
    for folder, name in _DEVKIT_FILES.items():
        path = raw / "devkit" / name
        annotations += [_annotation(record, "fname", f"{folder}/", path) for record in _records(_read_mat(path), path)]
    meta = raw / "devkit/cars_meta.mat"
    return _names(_read_mat(meta), meta), annotations


def _read_folders(raw: Path) -> tuple[list[str], list[Annotation]]:
    names = [row[0] for row in csv.reader(read_lines(raw / "names.csv"))]
    annotations: list[Annotation] = []
    for part in ("train", "test"):
        path = raw / f"anno_{part}.csv"
        for number, row in enumerate(csv.reader(read_lines(path)), start=1):
            if len(row) != _NUM_CSV_COLUMNS:
                raise DataError(f"{path}: line {number} does not have {_NUM_CSV_COLUMNS} columns; get the files again")
            *corners, label = read_numbers(row[1:], path)
            if not 1 <= label <= len(names):
                raise DataError(f"{path}: line {number} has class {label:.0f}, but names.csv has {len(names)} names; get the files again")
            folder = names[int(label) - 1].replace("/", "-")
            annotations.append((f"car_data/car_data/{part}/{folder}/{row[0]}", corners, int(label)))
    return names, annotations


def _read_mat(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    if not path.is_file():
        raise DataError(f"{path}: missing annotation file; get the files again")
    try:
        values: dict[str, Any] = loadmat(path, simplify_cells=True)
    except Exception as error:  # noqa: BLE001 (scipy raises whatever its parser stumbles over)
        raise DataError(f"{path}: damaged or not a MATLAB file ({type(error).__name__}); get the files again") from None
    return values


def _records(values: dict[str, Any], path: Path) -> Iterable[dict[str, Any]]:
    if "annotations" not in values:
        raise DataError(f"{path}: has no 'annotations'; get the files again")
    records: Iterable[dict[str, Any]] = values["annotations"]
    return records


def _names(values: dict[str, Any], path: Path) -> list[str]:
    if "class_names" not in values:
        raise DataError(f"{path}: has no 'class_names'; get the files again")
    return [str(name) for name in values["class_names"]]


def _annotation(record: dict[str, Any], path_field: str, folder: str, path: Path) -> Annotation:
    """One struct, read by its fields' names: their order differs between the layouts."""
    missing = [field for field in (path_field, "class", *_BOX_FIELDS) if field not in record]
    if missing:
        raise DataError(f"{path}: an annotation has no field '{missing[0]}'; the test annotations must be the ones with labels")
    return f"{folder}{record[path_field]}", [float(record[field]) for field in _BOX_FIELDS], int(record["class"])
