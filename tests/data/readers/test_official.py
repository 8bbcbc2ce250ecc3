"""Loaders of published datasets, tested on generated trees in each official layout and on file lists of the published length."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.recfunctions import drop_fields
from scipy.io import loadmat, savemat

from dml_core.data.drawing.layouts import WRITERS, Picture
from dml_core.data.prepare import prepare
from dml_core.data.readers.synthetic import Synthetic, draw_pictures
from dml_core.data.registry import materialise, parse_dataset
from dml_core.data.store.rows import Counts, Manifest, role_counts
from dml_core.errors import DataError

LAYOUTS = [layout for layout in WRITERS if layout != "idx"]  # "idx" has no class split: test_idx.py
LOADERS = {layout: layout if layout in ("cub200", "sop", "inshop") else "cars196" for layout in LAYOUTS}
CONFIG = Synthetic(num_classes=6, images_per_class=4, image_size=16, seed=5)


@pytest.fixture(scope="module")
def pictures() -> list[Picture]:
    """Drawn images whose boxes have four different coordinates."""
    return [replace(picture, box=(1.0 + n % 3, 4.0 + n % 2, 9.0 + n % 5, 15.0)) for n, picture in enumerate(draw_pictures(CONFIG))]


def write(layout: str, folder: Path, pictures: list[Picture]) -> Path:
    WRITERS[layout](folder, pictures, CONFIG.num_classes)
    return folder


def read(layout: str, raw: Path) -> Manifest:
    return parse_dataset(LOADERS[layout], {"published_counts": False}).read(raw)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loader_reads_back_what_the_generator_drew(layout: str, pictures: list[Picture], tmp_path: Path) -> None:
    manifest = read(layout, write(layout, tmp_path, pictures))
    drawn = {picture.jpeg: picture for picture in pictures}
    assert len(manifest.rows) == len(pictures) == len(drawn)
    for row in manifest.rows:
        picture = drawn[manifest.read_bytes(row)]
        assert row.label == picture.class_index + 1
        assert row.box == (None if layout == "sop" else picture.box)
        trains = picture.class_index < 3
        held_out = ("query", "gallery")[picture.number % 2] if layout == "inshop" else "test"
        assert row.role == ("train" if trains else held_out), "split by class; the planted classification split is not used"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_that_a_windows_program_saved_are_read(layout: str, pictures: list[Picture], tmp_path: Path) -> None:
    """With a byte order mark and its line ends."""
    rows = read(layout, write(layout, tmp_path, pictures)).rows
    for path in [*tmp_path.rglob("*.txt"), *tmp_path.rglob("*.csv")]:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read(layout, tmp_path).rows == rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_packs(layout: str, tmp_path: Path) -> None:
    options = {"num_classes": 4, "images_per_class": 4, "image_size": 16, "layout": layout}
    materialise("synthetic", options, tmp_path / "raw")
    assert prepare("synthetic", tmp_path / "raw", tmp_path / "out", options).num_classes == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_generated_tree_does_not_pass_for_the_official_archive(layout: str, pictures: list[Picture], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="published are"):
        parse_dataset(LOADERS[layout], {}).read(write(layout, tmp_path, pictures))


def sized(num_images: int, num_classes: int, first_class: int) -> list[Picture]:
    """Return images without pixels: `num_images` distributed over the classes as evenly as possible."""
    per_class = np.bincount(np.arange(num_images) % num_classes)
    return [Picture(first_class + c, n, b"", (0.0, 0.0, 1.0, 1.0)) for c, size in enumerate(per_class) for n in range(size)]


PUBLISHED = {
    "cub200": ((5_864, 100), (5_924, 100)),
    "cars-folders": ((8_054, 98), (8_131, 98)),
    "sop": ((59_551, 11_318), (60_502, 11_316)),
}


@pytest.mark.parametrize("layout", PUBLISHED)
def test_published_counts_at_full_length(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dml_core.data.drawing.layouts._write", lists_only)
    train, test = PUBLISHED[layout]
    pictures = sized(*train, 0) + sized(*test, train[1])
    halves = 2 * train[1]  # SOP's halves are not equal: the writer gets twice the number of training classes
    WRITERS[layout](tmp_path, pictures, halves if layout == "sop" else train[1] + test[1])
    rows = parse_dataset(LOADERS[layout], {}).read(tmp_path).rows
    assert role_counts(rows) == {"train": Counts(*train), "test": Counts(*test)}


def test_published_counts_of_inshop_at_full_length(tmp_path: Path) -> None:
    lines = []
    for role, num_images, num_classes, first in (
        ("train", 25_882, 3_997, 1),
        ("query", 14_218, 3_985, 3_998),
        ("gallery", 12_612, 3_985, 3_998),
    ):
        lines += [f"img/{role}/{index}.jpg   id_{first + index % num_classes:08d}   {role}  " for index in range(num_images)]
    lists_only(tmp_path / "Eval/list_eval_partition.txt", "\n".join(["52712", "image_name item_id evaluation_status", *lines]).encode())
    (tmp_path / "img").mkdir()
    rows = parse_dataset("inshop", {"boxes": False}).read(tmp_path).rows
    assert len(rows) == 52_712
    assert len({row.label for row in rows}) == 7_982
    broken = "\n".join(["52711", "image_name item_id evaluation_status", *lines[:-1]])
    (tmp_path / "Eval/list_eval_partition.txt").write_text(broken)
    with pytest.raises(DataError, match=r"gallery has 12611 images of 3985 classes, published are 12612"):
        parse_dataset("inshop", {"boxes": False}).read(tmp_path)


@cache
def made(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def lists_only(path: Path, data: bytes) -> None:
    """Replace the writers' `_write`: write the lists and make the folders, but none of the 120,053 image files."""
    made(path.parent)
    if path.suffix in (".txt", ".mat", ".csv"):
        path.write_bytes(data)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


DAMAGE = [
    ("cub200", "CUB_200_2011/images.txt", None, None, "missing annotation file"),
    ("cub200", "CUB_200_2011/images.txt", "\n5 ", "\nfive ", "line 5 does not have 2 columns"),
    ("cub200", "CUB_200_2011/classes.txt", "2 002", "7 002", "gap, 2 is missing"),
    ("cub200", "CUB_200_2011/image_class_labels.txt", "\n3 1", "", "image 3 .* has no class or no box"),
    ("cub200", "CUB_200_2011/image_class_labels.txt", "\n3 1", "\n3 9", "which classes.txt does not name"),
    ("cub200", "CUB_200_2011/bounding_boxes.txt", "\n3 ", "\n3 wide", "should be numbers"),
    ("cub200", "CUB_200_2011/image_class_labels.txt", "\n3 1", "\n3 nan", "'nan' should be numbers"),
    ("cub200", "CUB_200_2011/image_class_labels.txt", "\n3 1", "\n3 1e999", "'1e999' should be numbers"),
    ("sop", "Stanford_Online_Products/Ebay_test.txt", None, None, "missing annotation file"),
    ("sop", "Stanford_Online_Products/Ebay_test.txt", "image_id", "id", "does not begin with"),
    ("sop", "Stanford_Online_Products/Ebay_train.txt", "\n5 2 2 ", "\n5 2 ", "line 6 is not"),
    ("inshop", "Eval/list_eval_partition.txt", "24", "25", "do not match the count"),
    ("inshop", "Eval/list_eval_partition.txt", "train", "val", "none of train, query, gallery"),
    ("inshop", "Eval/list_eval_partition.txt", "query", "test", "none of train, query, gallery"),
    ("inshop", "Eval/list_eval_partition.txt", " id_", " item_", "not of the form"),
    ("inshop", "Anno/list_bbox_inshop.txt", None, None, "missing annotation file"),
    ("inshop", "Anno/list_bbox_inshop.txt", "1_front", "other_front", "has no box"),
    ("cars-annos", "cars_annos.mat", None, None, r"has car_ims/, and not cars_annos\.mat; get cars_annos\.mat .md5 b407c"),
    (
        "cars-devkit",
        "devkit/cars_meta.mat",
        None,
        None,
        r"has cars_test/, .*devkit/, and not cars_meta\.mat; get car_devkit\.tgz",
    ),
    ("cars-folders", "anno_test.csv", None, None, r"and not anno_test\.csv; get Kaggle's copy"),
    ("cars-folders", "anno_train.csv", "00002.jpg,", "", "line 2 does not have 6 columns"),
    ("cars-folders", "anno_train.csv", ",1\n", ",7\n", "has class 7, but names.csv has 6 names"),
    ("cub200", "CUB_200_2011/classes.txt", "2 002", "\u00b2 002", "line 2 does not have 2 columns"),
]


@pytest.mark.parametrize(("layout", "file", "old", "new", "message"), DAMAGE)
def test_damaged_annotations_are_one_line(
    layout: str, file: str, old: str | None, new: str | None, message: str, pictures: list[Picture], tmp_path: Path
) -> None:
    path = write(layout, tmp_path, pictures) / file
    if old is None or new is None:
        path.unlink()
    else:
        edit(path, old, new)
    with pytest.raises(DataError, match=message) as error:
        read(layout, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("layout", "file"), [("cub200", "CUB_200_2011/images.txt"), ("inshop", "Eval/list_eval_partition.txt")])
def test_annotations_that_cannot_be_read_are_one_line(layout: str, file: str, pictures: list[Picture], tmp_path: Path) -> None:
    path = write(layout, tmp_path, pictures) / file
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: cannot be read \(Is a directory\)"):
        read(layout, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_may_lack_classes(layout: str, pictures: list[Picture], tmp_path: Path) -> None:
    """The others keep their numbers and roles."""
    kept = [picture for picture in pictures if picture.class_index not in (1, 4)]
    rows = read(layout, write(layout, tmp_path, kept)).rows
    assert len(rows) == len(kept)
    assert {row.label: row.role == "train" for row in rows} == {1: True, 3: True, 4: False, 6: False}


def test_damaged_and_unlabelled_mat_files(pictures: list[Picture], tmp_path: Path) -> None:
    path = write("cars-devkit", tmp_path, pictures) / "devkit/cars_test_annos_withlabels.mat"
    whole, without = path.read_bytes(), loadmat(path)["annotations"]
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged or not a MATLAB file"):
        read("cars-devkit", tmp_path)
    savemat(path, {"annotations": drop_fields(without, "class")})
    with pytest.raises(DataError, match="no field 'class'"):
        read("cars-devkit", tmp_path)
    without["class"][0, 0] = np.zeros(0)
    savemat(path, {"annotations": without})
    with pytest.raises(DataError, match=r"withlabels\.mat: '\d+ \d+ \d+ \d+ \[\]' should be numbers"):
        read("cars-devkit", tmp_path)


def test_an_annotation_of_an_image_elsewhere_is_one_line(pictures: list[Picture], tmp_path: Path) -> None:
    path = write("cars-annos", tmp_path, pictures) / "cars_annos.mat"
    values = loadmat(path)
    values["annotations"]["relative_im_path"][0, 0] = "elsewhere/1.jpg"
    savemat(path, {name: value for name, value in values.items() if not name.startswith("__")})
    manifest = read("cars-annos", tmp_path)
    with pytest.raises(DataError, match=r"image 'elsewhere/1\.jpg' is in none of car_ims/; get the annotations again"):
        manifest.read_bytes(manifest.rows[0])


def test_annotation_that_names_a_missing_image(pictures: list[Picture], tmp_path: Path) -> None:
    write("cub200", tmp_path / "raw", pictures)
    next((tmp_path / "raw").rglob("*.jpg")).unlink()
    with pytest.raises(DataError, match="there is no such file"):
        prepare("cub200", tmp_path / "raw", tmp_path / "out", {"published_counts": False})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["cub200", "cars196", "sop", "inshop"])
def test_what_to_do_where_nothing_can_be_fetched(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no raw files"):
        materialise(name, {}, tmp_path)
    (tmp_path / "something").write_text("")
    materialise(name, {}, tmp_path)
