"""Icons of small themes made here, as SVG and PNG of known colours; links, repeated and invisible icons."""

import base64
import csv
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dml_core.data.check import check_dataset
from dml_core.data.drawing.icons import draw_icon
from dml_core.data.prepare import prepare
from dml_core.data.readers import icons
from dml_core.data.readers.icons import LINK, NOT_DRAWN, Theme
from dml_core.data.readers.shared.drawn import FEW, REPEATED, TWO_CLASSES
from dml_core.data.registry import fetch, parse_dataset
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Counts
from dml_core.errors import ConfigError, DataError
from tests.data.readers.debs import put_deb

OPTIONS = {"image_size": 32, "least_images": 2}


def svg(colour: str, width: int = 16, height: int = 16) -> bytes:
    """Return a rectangle that fills its picture."""
    size = f'width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect {size} fill="{colour}"/></svg>'.encode()


def png(colour: str, side: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGBA", (side, side), colour).save(data, "PNG")
    return data.getvalue()


def pixels(data: bytes, size: int = 32) -> np.ndarray:
    image = draw_icon(data, size)
    assert image is not None
    return np.asarray(image)


def test_a_picture_is_drawn_on_white_at_one_size_and_in_its_proportions() -> None:
    assert (pixels(svg("#ff0000")) == (255, 0, 0)).all()
    assert (pixels(png("#0000ff", 48)) == (0, 0, 255)).all()
    half = pixels(png("#00000080", 8))
    assert half.shape == (32, 32, 3)
    assert (abs(half.astype(int) - 127) <= 1).all(), "half of black on white"
    for wide in (svg("#008000", 32, 16), svg("#008000", 8, 4)):
        drawn = pixels(wide)
        assert (drawn[:8] == 255).all()
        assert (drawn[8:24] == (0, 128, 0)).all()
        assert (drawn[24:] == 255).all()


@pytest.mark.parametrize(
    "data", [svg("none"), svg("#ffffff"), svg("#f0f0f0"), png("#00000000", 16), b"", b"<svg", b"\x89PNG", svg("red")[:-9]]
)
def test_what_cannot_be_seen_or_read_is_no_picture(data: bytes) -> None:
    assert draw_icon(data, 32) is None


def test_text_and_files_beside_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "red.png").write_bytes(png("#ff0000", 8))
    text = '<text x="0" y="16" font-size="16">W</text>'
    image = '<image {}href{}"{}" width="16" height="16"/>'
    within = f"data:image/png;base64,{base64.b64encode(png('#ff0000', 8)).decode()}"
    monkeypatch.chdir(tmp_path)
    named = [image.format(*parts) for parts in (("", "=", tmp_path / "red.png"), ("xlink:", "=", "red.png"), ("", " = ", "red.png"))]
    for inside, is_drawn in [*((found, False) for found in (text, *named)), (image.format("", "=", within), True)]:
        start = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="16" height="16">'
        assert (draw_icon(f"{start}{inside}</svg>".encode(), 32) is not None) == is_drawn, inside


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home of a user whose cache has three themes in two packages, which the reader takes for its own."""
    folder = tmp_path / "home"
    at = "usr/share/icons"
    put_deb(
        folder,
        "icons-one",
        {
            f"{at}/One/48x48/apps/editor.png": png("#110000", 48),
            f"{at}/One/16x16/apps/editor.png": png("#ff00ff", 16),
            f"{at}/One/scalable/apps/editor.svg": svg("#ffff00"),
            f"{at}/One/48x48/apps/viewer.png": png("#001100", 48),
            f"{at}/One/16x16/apps/player.png": png("#000011", 16),
            f"{at}/One/22x22/apps/player.png": png("#000022", 22),
            f"{at}/One/scalable/actions/copy.svg": svg("#330000"),
            f"{at}/One/scalable/actions/copy-symbolic.svg": svg("#440000"),
            f"{at}/One/48x48@2x/apps/viewer.png": png("#ff00ff", 96),
            f"{at}/Dark/48/apps/editor.svg": svg("#ff00ff"),
        },
        {
            f"{at}/One/48x48/apps/paste.png": "../../scalable/actions/copy.svg",
            f"{at}/One/32x32/apps/copy.svg": "../../scalable/actions/copy.svg",
        },
    )
    put_deb(
        folder,
        "icons-two",
        {
            f"{at}/Two/apps/64/editor.svg": svg("#220000"),
            f"{at}/Two/apps/64/viewer.svg": svg("#220000"),
            f"{at}/Two/apps/64/player.svg": svg("#000033"),
            f"{at}/Two/actions/24/copy.svg": svg("#330000"),
            f"{at}/Two/actions/24/paste.svg": svg("#003300"),
            f"{at}/Three/apps/64/editor.svg": svg("#330033"),
            f"{at}/Three/apps/64/viewer.svg": svg("#333300"),
            f"{at}/Three/apps/64/player.svg": svg("#ffffff"),
            f"{at}/Three/apps/64/paste.svg": svg("#333333"),
            f"{at}/Three/apps/64/alone.svg": svg("#123456"),
        },
    )
    themes = {"one": ("icons-one", "One"), "two": ("icons-two", "Two"), "three": ("icons-two", "Three")}
    monkeypatch.setattr(icons, "THEMES", {name: Theme(*place, f"of {name}") for name, place in themes.items()})
    monkeypatch.setattr(Path, "home", lambda: folder)
    return folder


@pytest.mark.usefixtures("home")
def test_one_file_of_each_theme_is_drawn_and_what_is_left_out_says_why(tmp_path: Path) -> None:
    fetch("icons", OPTIONS, tmp_path / "raw")
    with (tmp_path / "raw/images.csv").open() as file:
        found = {row["path"]: (row["left_out"], row["file"].removeprefix("usr/share/icons/")) for row in csv.DictReader(file)}
    assert found == {
        "copy/one.png": (FEW, "One/scalable/actions/copy.svg"),
        "copy/two.png": (REPEATED, "Two/actions/24/copy.svg"),
        "editor/one.png": ("", "One/48x48/apps/editor.png"),  # the smallest that is not below 32
        "editor/two.png": (TWO_CLASSES, "Two/apps/64/editor.svg"),
        "editor/three.png": ("", "Three/apps/64/editor.svg"),
        "paste/one.png": (LINK, ""),
        "paste/two.png": ("", "Two/actions/24/paste.svg"),
        "paste/three.png": ("", "Three/apps/64/paste.svg"),
        "player/one.png": ("", "One/22x22/apps/player.png"),  # the largest
        "player/two.png": ("", "Two/apps/64/player.svg"),
        "player/three.png": (NOT_DRAWN, "Three/apps/64/player.svg"),
        "viewer/one.png": ("", "One/48x48/apps/viewer.png"),
        "viewer/two.png": (TWO_CLASSES, "Two/apps/64/viewer.svg"),
        "viewer/three.png": ("", "Three/apps/64/viewer.svg"),
    }


@pytest.mark.usefixtures("home")
def test_classes_are_split_by_name_and_hold_the_icon_s_colours(tmp_path: Path) -> None:
    fetch("icons", OPTIONS, tmp_path / "raw")
    prepare("icons", tmp_path / "raw", tmp_path / "out", OPTIONS)
    train, test = (PackedDataset(tmp_path / "out", role) for role in ("train", "test"))
    assert (train.class_names, test.class_names) == (["editor", "paste"], ["player", "viewer"])
    colours = {path: tuple(int(value) for value in train.image(index)[:, 5, 5]) for index, path in enumerate(train.paths)}
    assert colours == {
        "editor/one.png": (0x11, 0, 0),
        "editor/three.png": (0x33, 0, 0x33),
        "paste/three.png": (0x33, 0x33, 0x33),
        "paste/two.png": (0, 0x33, 0),
    }
    report = check_dataset("icons", tmp_path / "raw", OPTIONS)
    assert report.violations == []
    assert report.counts == {"train": Counts(4, 2), "test": Counts(4, 2)}
    assert {note.what: note.num_found for note in report.notes} == {
        f"left out: {LINK}": 1,
        f"left out: {NOT_DRAWN}": 1,
        f"left out: {TWO_CLASSES}": 2,
        f"left out: {REPEATED}": 1,
        f"left out: {FEW}": 1,
    }


@pytest.mark.usefixtures("home")
def test_options_choose_themes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch("icons", {**OPTIONS, "themes": ["two", "three"]}, tmp_path / "raw")
    with (tmp_path / "raw/images.csv").open() as file:
        assert {row["path"].split("/")[1] for row in csv.DictReader(file)} == {"two.png", "three.png"}
    with pytest.raises(ConfigError, match="no theme 'z'; themes are one, two, three"):
        parse_dataset("icons", {"themes": ["z"]})
    monkeypatch.setitem(icons.THEMES, "three", Theme("icons-two", "Thre", ""))
    with pytest.raises(
        DataError, match=r"icons-two_.*\.deb: has no icons in usr/share/icons/Thre; leave the theme out with the option 'themes'"
    ):
        fetch("icons", {**OPTIONS, "themes": ["two", "three"]}, tmp_path / "other")
