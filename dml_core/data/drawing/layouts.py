"""Writers of the official on-disk layouts: they write generated pictures as a tree for the real loaders.

The first half of the classes is the training part, as in every published DML split; IDX files have a training and a test file.
Where the publisher provides a classification split (CUB, Cars), the writers include one that mixes every class over both parts, which
exposes a loader that reads it.
"""

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dml_core.data.store.rows import Box

_SOP_SUPER_CLASSES = ("bicycle", "cabinet", "chair", "coffee_maker")
_INSHOP_VIEWS = ("front", "side", "back", "additional")
_MAT_HEADER_BYTES = 116


@dataclass(frozen=True)
class Picture:
    """One generated image: class (from 0), number within the class (from 0), JPEG bytes and the creature's box."""

    class_index: int
    number: int
    jpeg: bytes
    box: Box


Writer = Callable[[Path, Iterable[Picture], int], None]


def write_cub200(folder: Path, pictures: Iterable[Picture], num_classes: int) -> None:
    """Write `CUB_200_2011/` with its five tables and `images/001.Species_1/`."""
    root = folder / "CUB_200_2011"
    names = [f"{index + 1:03d}.Species_{index + 1}" for index in range(num_classes)]
    tables: dict[str, list[str]] = {name: [] for name in ("images", "image_class_labels", "bounding_boxes", "train_test_split")}
    for image, picture in enumerate(pictures, start=1):
        path = f"{names[picture.class_index]}/Species_{picture.class_index + 1}_{picture.number + 1:04d}.jpg"
        _write(root / "images" / path, picture.jpeg)
        left, top, right, bottom = picture.box
        tables["images"].append(f"{image} {path}")
        tables["image_class_labels"].append(f"{image} {picture.class_index + 1}")
        tables["bounding_boxes"].append(f"{image} {left:.1f} {top:.1f} {right - left:.1f} {bottom - top:.1f}")
        tables["train_test_split"].append(f"{image} {picture.number % 2}")
    tables["classes"] = [f"{index + 1} {name}" for index, name in enumerate(names)]
    for table, lines in tables.items():
        _write_lines(root / f"{table}.txt", lines)


def write_cars_annos(folder: Path, pictures: Iterable[Picture], num_classes: int) -> None:
    """Write `cars_annos.mat` and `car_ims/000001.jpg`."""
    records = []
    for image, picture in enumerate(pictures, start=1):
        path = f"car_ims/{image:06d}.jpg"
        _write(folder / path, picture.jpeg)
        records.append({"relative_im_path": path, **_cars_fields(picture), "test": picture.number % 2})
    _write_mat(folder / "cars_annos.mat", {"annotations": _structs(records), "class_names": _cells(_car_names(num_classes))})


def write_cars_devkit(folder: Path, pictures: Iterable[Picture], num_classes: int) -> None:
    """Write `devkit/*.mat`, `cars_train/00001.jpg` and `cars_test/00001.jpg`, each with pictures of every class."""
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for picture in pictures:
        part = ("train", "test")[picture.number % 2]
        name = f"{len(parts[part]) + 1:05d}.jpg"
        _write(folder / f"cars_{part}" / name, picture.jpeg)
        parts[part].append({**_cars_fields(picture), "fname": name})
    _write_mat(folder / "devkit/cars_train_annos.mat", {"annotations": _structs(parts["train"])})
    _write_mat(folder / "devkit/cars_test_annos_withlabels.mat", {"annotations": _structs(parts["test"])})
    _write_mat(folder / "devkit/cars_meta.mat", {"class_names": _cells(_car_names(num_classes))})


def write_cars_folders(folder: Path, pictures: Iterable[Picture], num_classes: int) -> None:
    """Write `car_data/car_data/train/<class>/00001.jpg`, `anno_train.csv`, `anno_test.csv`, `names.csv` (the Kaggle copy)."""
    names = _car_names(num_classes)
    tables: dict[str, list[list[Any]]] = {"train": [], "test": []}
    for picture in pictures:
        part = ("train", "test")[picture.number % 2]
        name = f"{len(tables[part]) + 1:05d}.jpg"
        _write(folder / "car_data/car_data" / part / names[picture.class_index].replace("/", "-") / name, picture.jpeg)
        fields = _cars_fields(picture)
        tables[part].append([name, *(fields[key] for key in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class"))])
    for part, rows in tables.items():
        _write_csv(folder / f"anno_{part}.csv", rows)
    _write_csv(folder / "names.csv", [[name] for name in names])


def write_sop(folder: Path, pictures: Iterable[Picture], num_classes: int) -> None:
    """Write `Stanford_Online_Products/{Ebay_train,Ebay_test,Ebay_info}.txt` and `bicycle_final/110000000001_0.JPG`."""
    root = folder / "Stanford_Online_Products"
    header = "image_id class_id super_class_id path"
    tables = {"train": [header], "test": [header], "info": [header]}
    for image, picture in enumerate(pictures, start=1):
        super_class = picture.class_index % len(_SOP_SUPER_CLASSES)
        path = f"{_SOP_SUPER_CLASSES[super_class]}_final/{110_000_000_001 + picture.class_index}_{picture.number}.JPG"
        _write(root / path, picture.jpeg)
        line = f"{image} {picture.class_index + 1} {super_class + 1} {path}"
        tables["train" if picture.class_index < num_classes // 2 else "test"].append(line)
        tables["info"].append(line)
    for part, lines in tables.items():
        _write_lines(root / f"Ebay_{part}.txt", lines)


def write_inshop(folder: Path, pictures: Iterable[Picture], num_classes: int) -> None:
    """Write `Eval/list_eval_partition.txt`, `Anno/list_bbox_inshop.txt` and `Img/img/WOMEN/Tees/id_00000001/01_1_front.jpg`."""
    partition, boxes = [], []
    for picture in pictures:
        item = f"id_{picture.class_index + 1:08d}"
        view = _INSHOP_VIEWS[picture.number % len(_INSHOP_VIEWS)]
        path = f"img/WOMEN/Tees/{item}/{picture.number // len(_INSHOP_VIEWS) + 1:02d}_{picture.number + 1}_{view}.jpg"
        role = "train" if picture.class_index < num_classes // 2 else ("query", "gallery")[picture.number % 2]
        _write(folder / "Img" / path, picture.jpeg)
        partition.append(f"{path:<80} {item} {role}")
        boxes.append(f"{path:<80} 1 1 " + " ".join(f"{int(side):03d}" for side in picture.box))
    _write_lines(folder / "Eval/list_eval_partition.txt", [str(len(partition)), "image_name item_id evaluation_status", *partition])
    _write_lines(folder / "Anno/list_bbox_inshop.txt", [str(len(boxes)), "image_name clothes_type pose_type x_1 y_1 x_2 y_2", *boxes])


def write_idx(folder: Path, pictures: Iterable[Picture], num_classes: int) -> None:
    """Write `{train,t10k}-images-idx3-ubyte` and `{train,t10k}-labels-idx1-ubyte` in grey; every second picture of a class is in `t10k`."""
    parts: dict[str, list[tuple[int, Any]]] = {"train": [], "t10k": []}
    for picture in pictures:
        grey_HW = np.asarray(Image.open(io.BytesIO(picture.jpeg)).convert("L"))
        parts[("train", "t10k")[picture.number % 2]].append((picture.class_index, grey_HW))
    for part, found in parts.items():
        _write(folder / f"{part}-images-idx3-ubyte", _idx(np.stack([grey_HW for _, grey_HW in found])))
        _write(folder / f"{part}-labels-idx1-ubyte", _idx(np.array([label for label, _ in found], dtype=np.uint8)))


WRITERS: dict[str, Writer] = {
    "cub200": write_cub200,
    "cars-annos": write_cars_annos,
    "cars-devkit": write_cars_devkit,
    "cars-folders": write_cars_folders,
    "sop": write_sop,
    "inshop": write_inshop,
    "idx": write_idx,
}


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _write_lines(path: Path, lines: list[str]) -> None:
    _write(path, ("\n".join(lines) + "\n").encode())


def _write_csv(path: Path, rows: list[list[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    _write(path, text.getvalue().encode())


def _car_names(num_classes: int) -> list[str]:
    """Return class names, some with a slash, as in 'Ram C/V Cargo Van Minivan 2012'."""
    return [f"Maker{'/' if index % 5 == 0 else ' '}Model {index + 1}" for index in range(num_classes)]


def _cars_fields(picture: Picture) -> dict[str, int]:
    """Return box corners, which count from 1 and are inclusive as in MATLAB, and the class, which counts from 1."""
    left, top, right, bottom = (int(side) for side in picture.box)
    return {"bbox_x1": left + 1, "bbox_y1": top + 1, "bbox_x2": right, "bbox_y2": bottom, "class": picture.class_index + 1}


def _structs(records: list[dict[str, Any]]) -> Any:
    """Return records as MATLAB's struct array."""
    fields = list(records[0])
    return np.array([tuple(record[field] for field in fields) for record in records], dtype=[(field, object) for field in fields])


def _cells(texts: list[str]) -> Any:
    return np.array(texts, dtype=object)


def _idx(array: Any) -> bytes:
    """Encode unsigned bytes as IDX."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape) + bytes(array.tobytes())


def _write_mat(path: Path, values: dict[str, Any]) -> None:
    """Write a MATLAB 5 file without the time stamp that scipy puts into its header."""
    from scipy.io import savemat

    buffer = io.BytesIO()
    savemat(buffer, values)
    _write(path, b"MATLAB 5.0 MAT-file".ljust(_MAT_HEADER_BYTES) + buffer.getvalue()[_MAT_HEADER_BYTES:])
