"""Cars196: 16,185 images of 196 car models (Krause et al., 2013), each with a bounding box; classes 1 to 98 train, the rest test.

Three layouts are in circulation and the original links are dead, so the layout is detected from the folder's files:

- "annos": `cars_annos.mat` and `car_ims/000001.jpg`;
- "devkit": `devkit/cars_{train,test}_annos*.mat`, `cars_train/00001.jpg`, `cars_test/00001.jpg`; the test labels
  (`cars_test_annos_withlabels.mat`) are in `devkit/`, or next to it as in torchvision;
- "folders": `anno_train.csv`, `anno_test.csv`, `names.csv` and `car_data/car_data/{train,test}/<class>/00001.jpg`.

Each has a classification split that mixes all classes; both parts are pooled and the split is never used. Box corners count from 1 and
are inclusive.
"""

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from dml_core.data.readers.shared.annotations import read_file, read_lines, read_numbers
from dml_core.data.readers.shared.archives import Archive
from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.readers.shared.places import find_place, names_there
from dml_core.data.store.rows import Counts, Role, Row
from dml_core.errors import DataError

_BOX_FIELDS = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
_NUM_CSV_COLUMNS = 6
Annotation = tuple[str, list[float], int]


class _Part(NamedTuple):
    """A file or folder of a layout.

    Attributes:
        paths: possible paths, relative to the dataset's folder; the first that exists is read.
        fetch: download that the error message names if it is missing.
    """

    paths: tuple[str, ...]
    fetch: str


def _devkit(name: str, beside: tuple[str, ...] = ()) -> tuple[str, ...]:
    return (f"devkit/{name}", f"car_devkit/devkit/{name}", *beside)


_LABELS = "cars_test_annos_withlabels.mat"
_KAGGLE = "Kaggle's copy (jutrera/stanford-car-dataset-by-classes-folder)"
# By layout: part -> paths. Rows name their images by the names of the parts that are folders.
_LAYOUTS = {
    "annos": {
        "cars_annos.mat": _Part(("cars_annos.mat",), "cars_annos.mat (md5 b407c6086d669747186bd1d764ff9dbc)"),
        "car_ims": _Part(("car_ims/car_ims", "car_ims"), "car_ims.tgz (md5 d5c8f0aa497503f355e17dc7886c3f14), and unpack it there"),
    },
    "devkit": {
        "cars_train_annos.mat": _Part(_devkit("cars_train_annos.mat"), "car_devkit.tgz (md5 c3b158d763b6e2245038c8ad08e45376)"),
        "cars_meta.mat": _Part(_devkit("cars_meta.mat"), "car_devkit.tgz (md5 c3b158d763b6e2245038c8ad08e45376)"),
        _LABELS: _Part(_devkit(_LABELS, (_LABELS,)), f"{_LABELS} (md5 b0a2b23655a3edd16d84508592a98d10), and put it into devkit/"),
        "cars_train": _Part(("cars_train/cars_train", "cars_train"), "cars_train.tgz (md5 065e5b463ae28d29e77c1b4b166cfe61)"),
        "cars_test": _Part(("cars_test/cars_test", "cars_test"), "cars_test.tgz (md5 4ce7ebf6a94d07f1952d94dd34c4d501)"),
    },
    "folders": {
        "names.csv": _Part(("names.csv",), _KAGGLE),
        "anno_train.csv": _Part(("anno_train.csv",), _KAGGLE),
        "anno_test.csv": _Part(("anno_test.csv",), _KAGGLE),
        "car_data/car_data": _Part(("car_data/car_data", "car_data"), _KAGGLE),
    },
}
Parts = dict[str, Path]


class Cars196(OfficialDataset):
    """A folder in any of the three layouts: the raw folder, or one or two levels below it (torchvision's `stanford_cars/`)."""

    published: ClassVar[Mapping[str, Counts]] = {"train": Counts(8_054, 98), "test": Counts(8_131, 98)}
    archives: ClassVar[tuple[Archive, ...]] = (
        Archive("car_ims.tgz", "car_ims", md5="d5c8f0aa497503f355e17dc7886c3f14"),
        Archive("cars_annos.mat", "cars_annos.mat", md5="b407c6086d669747186bd1d764ff9dbc"),
        Archive("car_devkit.tgz", "devkit", md5="c3b158d763b6e2245038c8ad08e45376"),
        Archive("cars_train.tgz", "cars_train", md5="065e5b463ae28d29e77c1b4b166cfe61"),
        Archive("cars_test.tgz", "cars_test", md5="4ce7ebf6a94d07f1952d94dd34c4d501"),
    )
    landmarks: ClassVar[tuple[str, ...]] = ("cars_annos.mat", "car_ims", "devkit", "car_devkit", "cars_train", "names.csv", "car_data")
    how_to_get: ClassVar[str] = (
        "the official links are dead; put car_ims and cars_annos.mat, or the devkit with cars_train and cars_test, or Kaggle's copy there"
    )

    def rows(self, raw: Path) -> list[Row]:
        """Return rows in the order of the annotation files, training file first; class numbers are the publisher's, from 1."""
        layout, parts = _parts(self.folder(raw))
        names, annotations = _READERS[layout](parts)
        rows = []
        for path, (left, top, right, bottom), label in annotations:
            if not 1 <= label <= len(names):
                raise DataError(
                    f"{raw}: image '{path}' has class {label}, but there are {len(names)} names of classes; get the files again"
                )
            role: Role = "train" if label <= len(names) // 2 else "test"
            rows.append(Row(path, label, names[label - 1], role, (left - 1, top - 1, right, bottom)))
        return rows

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """Return a reader that maps the folder names at the start of image paths to the copy's folders."""
        _, parts = _parts(self.folder(raw))
        folders = {f"{name}/": path for name, path in parts.items() if path.is_dir()}

        def read(row: Row) -> bytes:
            name = next((name for name in folders if row.path.startswith(name)), None)
            if name is None:
                raise DataError(f"{raw}: image '{row.path}' is in none of {', '.join(folders)}; get the annotations again")
            return read_file(folders[name] / row.path.removeprefix(name))

        return read


def _parts(folder: Path) -> tuple[str, Parts]:
    """Return the layout that is complete in a folder, and the paths of its parts.

    Raises:
        DataError: no layout is complete; the message names the parts missing from the most complete one and what to fetch.
    """
    found = {layout: {name: find_place(folder, part.paths) for name, part in parts.items()} for layout, parts in _LAYOUTS.items()}
    for layout, places in found.items():
        parts = {name: path for name, path in places.items() if path is not None}
        if len(parts) == len(places):
            return layout, parts
    layout = max(found, key=lambda layout: sum(path is not None for path in found[layout].values()))
    missing = [name for name, path in found[layout].items() if path is None]
    if len(missing) == len(found[layout]):
        raise DataError(f"{folder}: has {names_there(folder)}, of which none is of Cars196; {Cars196.how_to_get}")
    fetch = ", ".join(dict.fromkeys(_LAYOUTS[layout][name].fetch for name in missing))
    raise DataError(f"{folder}: has {names_there(folder)}, and not {', '.join(missing)}; get {fetch}")


def _read_annos(parts: Parts) -> tuple[list[str], list[Annotation]]:
    path = parts["cars_annos.mat"]
    values = _read_mat(path)
    annotations = [_annotation(record, "relative_im_path", "", path) for record in _field(values, "annotations", path)]
    return [str(name) for name in _field(values, "class_names", path)], annotations


def _read_devkit(parts: Parts) -> tuple[list[str], list[Annotation]]:
    annotations = []
    for folder, name in (("cars_train", "cars_train_annos.mat"), ("cars_test", _LABELS)):
        path = parts[name]
        annotations += [_annotation(record, "fname", f"{folder}/", path) for record in _field(_read_mat(path), "annotations", path)]
    meta = parts["cars_meta.mat"]
    return [str(name) for name in _field(_read_mat(meta), "class_names", meta)], annotations


def _read_folders(parts: Parts) -> tuple[list[str], list[Annotation]]:
    names = [row[0] for row in csv.reader(read_lines(parts["names.csv"]))]
    annotations: list[Annotation] = []
    for part in ("train", "test"):
        path = parts[f"anno_{part}.csv"]
        for number, row in enumerate(csv.reader(read_lines(path)), start=1):
            if len(row) != _NUM_CSV_COLUMNS:
                raise DataError(f"{path}: line {number} does not have {_NUM_CSV_COLUMNS} columns; get the files again")
            *corners, label = read_numbers(row[1:], path)
            if not 1 <= label <= len(names):
                raise DataError(f"{path}: line {number} has class {label:.0f}, but names.csv has {len(names)} names; get the files again")
            folder = names[int(label) - 1].replace("/", "-")
            annotations.append((f"car_data/car_data/{part}/{folder}/{row[0]}", corners, int(label)))
    return names, annotations


_READERS = {"annos": _read_annos, "devkit": _read_devkit, "folders": _read_folders}


def _read_mat(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    data = read_file(path)
    try:
        values: dict[str, Any] = loadmat(io.BytesIO(data), simplify_cells=True)
    except Exception as error:  # noqa: BLE001 (scipy raises whatever its parser stumbles over)
        raise DataError(f"{path}: damaged or not a MATLAB file ({type(error).__name__}); get the files again") from None
    return values


def _field(values: dict[str, Any], name: str, path: Path) -> Any:
    if name not in values:
        raise DataError(f"{path}: has no '{name}'; get the files again")
    return values[name]


def _annotation(record: dict[str, Any], path_field: str, folder: str, path: Path) -> Annotation:
    """Read one struct by its field names, because their order differs between the layouts."""
    missing = [field for field in (path_field, "class", *_BOX_FIELDS) if field not in record]
    if missing:
        raise DataError(f"{path}: an annotation has no field '{missing[0]}'; the test annotations must be the ones with labels")
    *corners, label = read_numbers([str(record[field]) for field in (*_BOX_FIELDS, "class")], path)  # an empty value is an array
    return f"{folder}{record[path_field]}", corners, int(label)
