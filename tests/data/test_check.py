"""`check` lists every problem of a raw folder; the contact sheet shows the images at their places."""

import io
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dml_core.data.check import CheckReport, check_dataset, check_own_images
from dml_core.data.prepare import prepare
from dml_core.data.registry import dataset_class
from dml_core.data.sheet import _tile, contact_sheet
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Counts
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import ConfigError, DataError
from tests.data.conftest import OPTIONS


@pytest.fixture
def raw(raw_synthetic: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(raw_synthetic, tmp_path / "raw"))


def check(raw: Path) -> CheckReport:
    return check_dataset("synthetic", raw, OPTIONS)


def image(raw: Path, class_number: int, number: int) -> Path:
    name = f"Species_{class_number}"
    return raw / f"CUB_200_2011/images/{class_number:03d}.{name}/{name}_{number:04d}.jpg"


def found(report: CheckReport) -> dict[str, tuple[str, ...]]:
    return {finding.what: tuple(path.rpartition("/")[2] for path in finding.examples) for finding in report.violations}


def test_a_sound_folder_has_no_violations(raw: Path) -> None:
    report = check(raw)
    assert report.violations == []
    assert report.counts == {"train": Counts(15, 3), "test": Counts(15, 3)}
    assert report.published == {}
    modes = [Image.open(io.BytesIO(path.read_bytes())).mode for path in raw.rglob("*.jpg")]
    assert [(note.what, note.num_found) for note in report.notes] == [("grayscale, converted to RGB", modes.count("L"))]


def test_every_problem_is_listed(raw: Path) -> None:
    image(raw, 1, 1).write_bytes(b"")
    image(raw, 2, 1).write_bytes(image(raw, 2, 2).read_bytes()[:-30])
    shutil.copy(image(raw, 3, 1), image(raw, 4, 1))
    shutil.copy(image(raw, 5, 1), image(raw, 5, 2))
    boxes = raw / "CUB_200_2011/bounding_boxes.txt"
    lines = boxes.read_text().splitlines()
    boxes.write_text("\n".join([*lines[:29], "30 20.0 20.0 20.0 5.0"]) + "\n")
    report = check(raw)
    assert found(report) == {
        "unreadable": ("Species_1_0001.jpg (the file is empty; restore it)", "Species_2_0001.jpg (damaged or truncated)"),
        "same bytes in train and in another role": ("Species_3_0001.jpg", "Species_4_0001.jpg"),
        "box outside the image": ("Species_6_0005.jpg",),
    }


def test_the_same_pixels_in_two_classes_are_noted_whatever_their_bytes(raw: Path) -> None:
    image(raw, 2, 1).write_bytes(image(raw, 1, 1).read_bytes() + b"after the end")
    shutil.copy(image(raw, 3, 1), image(raw, 3, 2))
    report = check(raw)
    assert report.violations == []
    notes = {note.what: tuple(Path(path).name for path in note.examples) for note in report.notes}
    assert notes["same pixels in two classes"] == ("Species_1_0001.jpg", "Species_2_0001.jpg")


@pytest.mark.parametrize(
    ("roles", "copies", "noted"),
    [
        (("train", "train", "test", "test"), ("c/1.png", "c/2.png"), True),
        (("train", "train", "test", "test"), ("a/1.png", "a/2.png"), False),
        (("train", "train", "query", "gallery"), ("c/1.png", "d/1.png"), True),
        (("train", "train", "query", "gallery"), ("d/1.png", "d/2.png"), False),
    ],
)
def test_images_that_find_their_own_copies_are_noted(tmp_path: Path, roles: tuple[str, ...], copies: tuple[str, str], noted: bool) -> None:
    """They raise Recall@1. A copy among training images, or two in the gallery, are no query's own."""
    lines = ["path,label,role"]
    for folder, role in zip("abcd", roles, strict=True):
        for number in (1, 2, 3):
            path = tmp_path / folder / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (12, 12), (ord(folder), number, 0)).save(path)
            label = "c" if role == "gallery" else folder
            lines.append(f"{folder}/{number}.png,{label},{role}")
    for number, role in enumerate(roles[2:]):  # another class
        Image.new("RGB", (12, 12), (0, 0, number)).save(tmp_path / f"e{number}.png")
        lines.append(f"e{number}.png,e,{role}")
    with Image.open(tmp_path / copies[0]) as picture:
        picture.save(tmp_path / copies[1], compress_level=1)
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    report = check_dataset("manifest", tmp_path, {})
    notes = {note.what: note.examples for note in report.notes}
    assert report.violations == []
    found = notes.get("copies (same pixels) in a scored class: each finds the other first, which raises Recall@1")
    assert found == (copies if noted else None)


def test_a_single_class_to_score_is_a_violation(tmp_path: Path) -> None:
    """Each of its images finds another one of its class."""
    for number, name in enumerate("aabbcc"):
        (tmp_path / "raw" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (number, 0, 0)).save(tmp_path / f"raw/{name}/{number}.png")
    (tmp_path / "raw/list.csv").write_text(
        "path,label,role\n"
        + "".join(f"{name}/{number}.png,{name},{'test' if name == 'c' else 'train'}\n" for number, name in enumerate("aabbcc"))
    )
    (violation,) = check_dataset("manifest", tmp_path / "raw", {"file": "list.csv"}).violations
    assert (violation.what, violation.examples) == ("fewer than two classes to train on, or to score", ("only class 'c' to score",))


def test_queries_of_one_class_are_scored_in_a_gallery_of_several(tmp_path: Path) -> None:
    rows = ["a,train", "a,train", "b,train", "b,train", "c,query", "c,gallery", "d,gallery"]
    for number in range(len(rows)):
        Image.new("RGB", (12, 12), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "list.csv").write_text("path,label,role\n" + "".join(f"{number}.png,{row}\n" for number, row in enumerate(rows)))
    assert check_dataset("manifest", tmp_path, {"file": "list.csv"}).violations == []


def test_of_images_of_one_size_only_copies_are_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million images almost all have the size of another one in another role."""
    for number, name in enumerate("aabbccdd"):
        (tmp_path / name).mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name / f"{number}.bmp")
    whole: list[str] = []
    monkeypatch.setattr("dml_core.data.check.read_file", lambda path: (whole.append(path.name), path.read_bytes())[1])
    check_own_images("folder", tmp_path, {})
    assert whole == []
    shutil.copy(tmp_path / "a/0.bmp", tmp_path / "d/7.bmp")
    with pytest.raises(DataError, match=r"2 images: same bytes in train and in another role, the first is a/0\.bmp; "):
        check_own_images("folder", tmp_path, {})
    assert sorted(whole) == ["0.bmp", "7.bmp"]


def test_cmyk_is_noted_and_missing_is_unreadable(raw: Path) -> None:
    with Image.open(image(raw, 1, 1)) as picture:
        picture.convert("CMYK").save(image(raw, 1, 1))
    image(raw, 1, 2).unlink()
    report = check(raw)
    assert "CMYK, converted to RGB" in [note.what for note in report.notes]
    assert found(report) == {"unreadable": ("Species_1_0002.jpg (listed, but there is no such file; restore it or correct the list)",)}


def test_an_image_whose_metadata_only_pillow_refuses_is_readable_as_for_prepare(tmp_path: Path) -> None:
    texts = PngInfo()
    texts.add_itxt("comment", "x" * 3_000_000, zip=True)  # Pillow's limit is 1 MiB
    for name in (f"{folder}/{number}.png" for folder in "abcd" for number in (1, 2)):
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (ord(name[0]), ord(name[2]), 0)).save(tmp_path / "raw" / name, pnginfo=texts)
    assert prepare("folder", tmp_path / "raw", tmp_path / "out", {}).roles["train"].num_images == 4
    report = check_dataset("folder", tmp_path / "raw", {})
    assert report.violations == []
    assert report.short_sides == (12, 12, 12)


def test_the_files_are_checked_whatever_size_is_stored(tmp_path: Path) -> None:
    lines = ["path,label,left,top,right,bottom"]
    for name in "12345678":
        Image.new("L", (30, 20), int(name)).save(tmp_path / f"{name}.png")
        lines.append(f"{name}.png,{'abcd'[(int(name) - 1) // 2]},0,0,500,500")
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    report = check_dataset("manifest", tmp_path, {"stored_size": 10})
    assert report == check_dataset("manifest", tmp_path, {})
    assert report.short_sides == (20, 20, 20)
    assert report.num_boxes == report.notes[0].num_found == 8
    assert [violation.what for violation in report.violations] == ["box outside the image"]


def test_what_decoding_changes_is_noted(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 255, (8, 12, 12, 4), dtype=np.uint8)
    opaque = Image.fromarray(colours[1]).convert("RGB").convert("RGBA")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    Image.fromarray(colours[0]).save(tmp_path / "a/transparent.png")
    opaque.save(tmp_path / "a/opaque.png")
    Image.fromarray(colours[2]).convert("RGB").quantize(8).save(tmp_path / "a/palette.gif", transparency=3)
    Image.fromarray(colours[3, ..., 0].astype(np.uint16) * 16).save(tmp_path / "b/deep.png")
    frames = [Image.fromarray(part).convert("RGB") for part in colours[4:7]]
    frames[0].save(tmp_path / "b/animated.webp", save_all=True, append_images=frames[1:])
    frames[1].save(tmp_path / "b/phone.jpg", format="MPO", save_all=True, append_images=frames[2:])
    assert {note.what: note.examples for note in check_dataset("folder", tmp_path, {}).notes} == {
        "transparent pixels, replaced by the colours stored under them": ("a/palette.gif", "a/transparent.png"),
        "more than 8 bits per channel, reduced to 8": ("b/deep.png",),
        "several pictures in the file, of which the first is used": ("b/animated.webp",),
    }


def test_more_than_8_bits_are_noted_in_every_format_that_has_them(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 1023, (8, 12, 12, 3))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    write_tiff(tmp_path / "a/deep.tiff", colours[0])
    for name, most in (("a/deep.ppm", 1023), ("a/whole.ppm", 255)):
        header, kind = f"P6 12 12 {most}\n".encode(), ">u2" if most > 255 else "u1"
        (tmp_path / name).write_bytes(header + (colours[1] % (most + 1)).astype(kind).tobytes())
    (tmp_path / "a/deep_text.ppm").write_text(f"P3 12 12 1023\n{' '.join(map(str, colours[2].ravel()))}\n")
    eight = colours[3:].astype(np.uint8)
    for picture, name in zip(eight, ("a/whole.tiff", "a/whole.jp2", "b/1.png", "b/2.jpg", "b/3.webp"), strict=True):
        Image.fromarray(picture).save(tmp_path / name)
    deep = (tmp_path / "a/whole.jp2").read_bytes()
    place = deep.index(b"\xff\x4f\xff\x51") + 42
    assert deep[place : place + 9 : 3] == bytes([7, 7, 7]), "the bits of each channel, less one"
    (tmp_path / "a/deep.jp2").write_bytes(
        deep[:place] + bytes([11, *deep[place + 1 : place + 3], 11, *deep[place + 4 : place + 6], 11]) + deep[place + 7 :]
    )
    notes = {note.what: note.examples for note in check_dataset("folder", tmp_path, {}).notes}
    assert notes["more than 8 bits per channel, reduced to 8"] == ("a/deep.jp2", "a/deep.ppm", "a/deep.tiff", "a/deep_text.ppm")


def write_tiff(path: Path, colours: np.ndarray) -> None:
    """Write a TIFF of 16 bits per channel, which Pillow cannot: a header, ten tags, the bits of each channel, the pixels."""
    height, width, _ = colours.shape
    pixels = colours.astype("<u2").tobytes()
    at_bits = 8 + 2 + 10 * 12 + 4
    tags = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, at_bits), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, at_bits + 6)]
    tags += [(277, 3, 1, 3), (278, 3, 1, height), (279, 4, 1, len(pixels)), (284, 3, 1, 1)]
    table = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + table + struct.pack("<HHH", 16, 16, 16) + pixels)


def test_classes_whose_names_look_the_same_are_noted(tmp_path: Path) -> None:
    """On most systems of Macs such folders are one, so a copy made elsewhere may have split a class."""
    for number, name in enumerate(("Bird", "bird", "bi rd", "\u00c9toile", "E\u0301toile", "cat")):
        (tmp_path / name).mkdir()
        for copy in range(2):
            Image.new("RGB", (8, 8), (number, copy, 0)).save(tmp_path / f"{name}/{copy}.png")
    (note,) = check_dataset("folder", tmp_path, {}).notes
    assert note.what == "classes whose names differ only in case, white space or Unicode form, one image of each"
    assert set(note.examples) == {"Bird/0.png", "bird/0.png", "bi rd/0.png", "\u00c9toile/0.png", "E\u0301toile/0.png"}


@pytest.mark.parametrize(
    ("transform", "options", "expected"),
    [
        ({"crop_size": 20}, {}, ("1.png",)),
        ({"crop_size": 20, "crop_to_box": True}, {}, ("1.png", "2.png")),
        ({"crop_size": 20, "test_resize": 20}, {}, ()),
        ({"crop_size": 20, "test_resize": (30, 15)}, {}, ("1.png", "2.png", "3.png", "4.png")),
        ({"crop_size": 20}, {"stored_size": 20}, ()),
        ({"crop_size": 20, "crop_to_box": True}, {"stored_size": 19}, ("1.png", "2.png", "3.png", "4.png")),
        ({}, {}, ()),
    ],
)
def test_images_that_test_views_pad_are_noted(
    transform: dict[str, Any], options: dict[str, Any], expected: tuple[str, ...], tmp_path: Path
) -> None:
    lines = ["path,label,left,top,right,bottom", "1.png,a,,,,", "2.png,a,3,0,22,30", "3.png,b,,,,", "4.png,b,0,0,20,20"]
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    for number in range(1, 5):
        Image.new("RGB", (40, 10 if number == 1 else 30), (number, 0, 0)).save(tmp_path / f"{number}.png")
    report = check_dataset("manifest", tmp_path, options, transforms=[TransformConfig(**transform)])
    notes = {note.what: note.examples for note in report.notes}
    assert notes.get("smaller than the test views, padded with black", ()) == expected
    without_box = tuple(f"{number}.png" for number in ((1, 2, 3, 4) if "stored_size" in options else (1, 3)))
    assert notes.get("without a box, where views are cut to boxes: a run stops there", ()) == without_box * ("crop_to_box" in transform)


@pytest.mark.parametrize(
    ("transform", "options", "expected"),
    [
        ({"crop_size": 9, "test_resize": 10}, {}, ("long.png",)),
        ({"crop_size": 9, "test_resize": 10}, {"stored_size": 20}, ("long.png",)),
        ({"crop_size": 9, "test_resize": (10, 10)}, {}, ()),
        ({"crop_size": 9, "test_resize": 10, "crop_to_box": True}, {}, ()),
        ({"crop_size": 9}, {}, ("long.png", "2.png", "3.png", "4.png")),
        ({"crop_size": 10}, {}, ("long.png",)),
        ({"test_resize": 10}, {}, ()),
    ],
)
def test_images_of_which_test_views_show_little_are_noted(
    transform: dict[str, Any], options: dict[str, Any], expected: tuple[str, ...], tmp_path: Path
) -> None:
    lines = ["path,label,left,top,right,bottom", "long.png,a,0,0,10,10", *(f"{number}.png,{'ab'[number // 3]},,,," for number in (2, 3, 4))]
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    for number, name in enumerate(("long", "2", "3", "4")):
        Image.new("RGB", (10, 400) if name == "long" else (20, 20), (number, 0, 0)).save(tmp_path / f"{name}.png")
    report = check_dataset("manifest", tmp_path, options, transforms=[TransformConfig(**transform)])
    notes = {note.what: note.examples for note in report.notes}
    assert notes.get("images of which a test view shows less than a quarter", ()) == expected


def test_published_counts_are_part_of_it(raw: Path) -> None:
    image(raw, 1, 1).write_bytes(b"")
    report = check_dataset("cub200", raw, {})
    assert report.published["train"] == Counts(5_864, 100)
    assert report.class_sizes == {"train": (5, 5), "test": (5, 5)}
    counts, unreadable = report.violations
    assert counts.examples[0] == "train has 15 images of 3 classes, published are 5864 of 100"
    assert counts.num_found == 2
    assert unreadable.what == "unreadable", "the images are looked at all the same"


@pytest.mark.parametrize("name", ["icons", "glyphs", "cub200", "mnist"])
def test_before_the_files_are_there_it_says_how_to_get_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"raw: no such folder; .*{dataset_class(name).how_to_get[:20]}"):
        check_dataset(name, tmp_path / "raw", {})


def test_progress_counts_all_images(raw: Path) -> None:
    calls: list[tuple[int, int]] = []
    check_dataset("synthetic", raw, OPTIONS, progress=lambda *call: calls.append(call))
    assert calls[-1] == (30, 30)


def test_contact_sheet_has_a_row_per_class(packed_synthetic: Path, tmp_path: Path) -> None:
    contact_sheet(packed_synthetic, "test", num_classes=2, num_samples=3, path=tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.shape == (204, 480, 3)
    dataset = PackedDataset(packed_synthetic, "test")
    for row, column, index in ((0, 0, 0), (0, 2, 4), (1, 1, 7)):
        picture = Image.open(io.BytesIO(dataset.raw_bytes(index))).convert("RGB").resize((96, 96))
        tile = sheet[row * 100 + 4 :, 180 + column * 100 :][:96, :96]
        assert np.median(np.abs(tile.astype(int) - np.asarray(picture))) <= 2, "the box is drawn over it, the rest is the image"


def test_a_box_smaller_than_a_pixel_of_its_tile_is_drawn() -> None:
    """A detector's small product in a large photograph."""
    photograph = SimpleNamespace(image=lambda _: torch.full((3, 1500, 2000), 255, dtype=torch.uint8), box=lambda _: (1000, 600, 1012, 605))
    tile = np.asarray(_tile(photograph, 0))  # type: ignore[arg-type]
    drawn = np.argwhere((tile != 255).any(axis=2))
    assert {(int(row), int(column)) for row, column in drawn} <= {(40, 48), (41, 48)}
    assert len(drawn) > 0


def test_a_contact_sheet_has_the_letters_of_other_languages(tmp_path: Path) -> None:
    for path in (tmp_path / "raw" / name / f"{number}.png" for name in ("ä", "é", "ö", "я") for number in (1, 2)):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    prepare("folder", tmp_path / "raw", tmp_path / "packed", {})
    for role in ("train", "test"):
        contact_sheet(tmp_path / "packed", role, 2, 2, tmp_path / "sheet.png")
        names = np.asarray(Image.open(tmp_path / "sheet.png"))[:, :180]
        assert (names[4:100] != names[104:200]).any(), "a letter that the font lacks is a box"


def test_a_contact_sheet_is_no_wider_than_its_largest_class_and_refused_if_it_is_too_large(
    packed_synthetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contact_sheet(packed_synthetic, "test", 10**9, 10**9, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (180 + 5 * 100, 3 * 100 + 4)
    monkeypatch.setattr("dml_core.data.sheet.MOST_PIXELS", 100_000)
    with pytest.raises(ConfigError, match=r"^a sheet of 3 classes with 8 images is too large; lower --classes or --samples$"):
        contact_sheet(packed_synthetic, "test", 10, 8, tmp_path / "sheet.png")
