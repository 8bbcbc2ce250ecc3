"""Characters of small fonts made here, whose outlines are rectangles of known sides, and of two real fonts."""

import csv
import hashlib
import io
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image

from dml_core.data.check import check_dataset
from dml_core.data.prepare import prepare
from dml_core.data.readers import glyphs
from dml_core.data.readers.glyphs import NOT_DRAWN, Font, Glyphs
from dml_core.data.readers.shared.drawn import FEW, REPEATED, TWO_CLASSES
from dml_core.data.registry import fetch, parse_dataset
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Counts
from dml_core.errors import ConfigError, DataError
from tests.conftest import ROOT
from tests.data.readers.debs import put_deb

EM = 1000
ONE = 0x4E00
BOX = (900, 900)  # the fonts' sign for a missing character
OPTIONS = {"image_size": 40, "least_images": 2}


def font(shapes: dict[int, tuple[int, int]], offset: int = 0) -> bytes:
    """Return a TrueType font: code point -> width and height of a rectangle, in thousandths of the em; (0, 0) is without ink."""
    outlines = {".notdef": BOX, **{f"g{point:X}": shape for point, shape in shapes.items()}}
    drawn = {}
    for name, (width, height) in outlines.items():
        pen = TTGlyphPen(None)
        if width:
            pen.moveTo((offset, 0))
            for corner in ((offset, height), (offset + width, height), (offset + width, 0)):
                pen.lineTo(corner)
            pen.closePath()
        drawn[name] = pen.glyph()
    builder = FontBuilder(EM, isTTF=True)
    builder.setupGlyphOrder(list(outlines))
    builder.setupCharacterMap({point: f"g{point:X}" for point in shapes})
    builder.setupGlyf(drawn)
    builder.setupHorizontalMetrics(dict.fromkeys(outlines, (EM, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "t", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    data = io.BytesIO()
    builder.save(data)
    return data.getvalue()


# Rows: characters 0 to 5; each font's rectangle, None if it has no such character.
SHAPES = {
    "a": [(500, 250), (250, 500), (600, 300), (0, 0), (700, 100), (100, 700)],
    "b": [(550, 250), (250, 550), (600, 300), BOX, (800, 100), (150, 700)],
    "c": [(500, 250), (300, 300), (300, 600), (200, 200), (800, 100), None],
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home of a user whose cache has three fonts in two packages, which the reader takes for its own."""
    folder = tmp_path / "home"
    found = {name: font({ONE + i: shape for i, shape in enumerate(shapes) if shape}) for name, shapes in SHAPES.items()}
    put_deb(folder, "fonts-two", {f"usr/share/fonts/t/{name}.ttf": found[name] for name in "ab"})
    put_deb(folder, "fonts-one", {"usr/share/fonts/t/c.ttf": found["c"]}, {"usr/share/fonts/t/d.ttf": "c.ttf"})
    packages = {"a": "fonts-two", "b": "fonts-two", "c": "fonts-one"}
    monkeypatch.setattr(glyphs, "FONTS", {n: Font(package, f"t/{n}.ttf", 0, "box", f"of {n}") for n, package in packages.items()})
    monkeypatch.setattr(Path, "home", lambda: folder)
    return folder


def table(raw: Path) -> dict[str, str]:
    """Return path -> reason to leave the picture out."""
    with (raw / "images.csv").open() as file:
        return {row["path"]: row["left_out"] for row in csv.DictReader(file)}


@pytest.mark.usefixtures("home")
def test_the_ink_is_drawn_in_the_middle_at_the_size_of_the_font(tmp_path: Path) -> None:
    manifest = Glyphs(**OPTIONS)
    fetch("glyphs", OPTIONS, tmp_path / "raw")
    rows = manifest.read(tmp_path / "raw")
    seen = {}
    for row in rows.rows:
        ink_HW = np.asarray(Image.open(io.BytesIO(rows.read_bytes(row)))) < 128
        ys, xs = np.nonzero(ink_HW)
        assert ink_HW.shape == (40, 40)
        assert abs((ys.min() + ys.max()) / 2 - 19.5) <= 1
        assert abs((xs.min() + xs.max()) / 2 - 19.5) <= 1
        seen[row.path] = (int(np.ptp(xs)) + 1, int(np.ptp(ys)) + 1)
    for path, size in seen.items():
        name, source = path.removesuffix(".png").split("/")
        wanted = SHAPES[source][int(name[2:], 16) - ONE]
        assert size == pytest.approx([0.8 * 40 * side / EM for side in wanted], abs=1), path


@pytest.mark.usefixtures("home")
def test_what_is_left_out_and_why(tmp_path: Path) -> None:
    fetch("glyphs", OPTIONS, tmp_path / "raw")
    assert table(tmp_path / "raw") == {
        "U+4E00/a.png": "",
        "U+4E00/b.png": "",
        "U+4E00/c.png": REPEATED,  # as font a's
        "U+4E01/a.png": "",
        "U+4E01/b.png": "",
        "U+4E01/c.png": "",
        "U+4E02/a.png": "",
        "U+4E02/b.png": REPEATED,
        "U+4E02/c.png": "",
        "U+4E03/a.png": NOT_DRAWN,  # no ink
        "U+4E03/b.png": NOT_DRAWN,  # the sign for a missing character
        "U+4E03/c.png": FEW,
        "U+4E04/a.png": "",
        "U+4E04/b.png": "",
        "U+4E04/c.png": REPEATED,  # as font b's
        "U+4E05/a.png": "",
        "U+4E05/b.png": "",
    }


def test_characters_that_a_font_draws_alike_are_left_out_of_both_classes(home: Path, tmp_path: Path) -> None:
    same = {ONE: (500, 250), ONE + 1: (500, 250), ONE + 2: (600, 300), ONE + 3: (650, 300)}
    other = {ONE: (510, 650), ONE + 1: (520, 750), ONE + 2: (600, 400), ONE + 3: (650, 400)}
    third = {ONE: (310, 650), ONE + 1: (320, 750), ONE + 2: (300, 400), ONE + 3: (350, 400)}
    for path in (home / ".cache/dml-repro").iterdir():
        path.unlink()
    rebuilt = home / "again"
    put_deb(rebuilt, "fonts-two", {"usr/share/fonts/t/a.ttf": font(same), "usr/share/fonts/t/b.ttf": font(other)})
    put_deb(rebuilt, "fonts-one", {"usr/share/fonts/t/c.ttf": font(third)})
    for path in (rebuilt / ".cache/dml-repro").glob("*.deb"):
        path.rename(home / ".cache/dml-repro" / path.name)
    fetch("glyphs", OPTIONS, tmp_path / "raw")
    left_out = {path: reason for path, reason in table(tmp_path / "raw").items() if reason}
    assert left_out == {"U+4E00/a.png": TWO_CLASSES, "U+4E01/a.png": TWO_CLASSES}
    report = check_dataset("glyphs", tmp_path / "raw", OPTIONS)
    assert report.counts == {"train": Counts(4, 2), "test": Counts(6, 2)}
    assert {note.what: note.num_found for note in report.notes} == {f"left out: {TWO_CLASSES}": 2, "grayscale, converted to RGB": 10}
    fetch("glyphs", {**OPTIONS, "least_images": 3}, tmp_path / "raw")
    assert {path: reason for path, reason in table(tmp_path / "raw").items() if reason} == left_out | {
        f"U+4E0{number}/{name}.png": FEW for number in (0, 1) for name in "bc"
    }


@pytest.mark.usefixtures("home")
def test_the_same_packages_and_options_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        fetch("glyphs", OPTIONS, tmp_path / name)
        prepare("glyphs", tmp_path / name, tmp_path / f"packed-{name}", OPTIONS)
    files = [
        sorted(path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*") if path.is_file()) for name in ("one", "two")
    ]
    assert files[0] == files[1]
    for file in files[0]:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file
    assert len({(tmp_path / f"packed-{name}/dataset.json").read_bytes() for name in ("one", "two")}) == 1
    packed = PackedDataset(tmp_path / "packed-one", "train")
    assert packed.class_names == ["U+4E00", "U+4E01"]
    assert packed.image(0).shape == (3, 40, 40)


def test_sources_and_licences_are_recorded_and_a_changed_font_is_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch("glyphs", OPTIONS, tmp_path / "raw")
    with (tmp_path / "raw/sources.csv").open() as file:
        sources = {row.pop("name"): row for row in csv.DictReader(file)}
    content = (home / "fonts-one.tree/usr/share/fonts/t/c.ttf").read_bytes()
    assert sources["c"] == {
        "package": "fonts-one",
        "version": "1:2-1",
        "licence": "of c",
        "file": "usr/share/fonts/t/c.ttf",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert (tmp_path / "raw/licences/fonts-one.txt").read_text() == "licence of fonts-one"
    published = {name: row["sha256"] for name, row in sources.items()}
    monkeypatch.setattr(Glyphs, "published", {"train": Counts(1, 1)})
    monkeypatch.setattr(Glyphs, "published_sha256", published)
    dataset = Glyphs(**OPTIONS)
    assert dataset.published_for(tmp_path / "raw") == {}, "other options than the default"
    monkeypatch.setattr(Glyphs, "_options", lambda _: "")
    assert dataset.published_for(tmp_path / "raw") == {"train": Counts(1, 1)}
    monkeypatch.setattr(Glyphs, "published_sha256", published | {"c": "0" * 64})
    assert dataset.published_for(tmp_path / "raw") == {}
    assert dataset.notes(tmp_path / "raw")["source differs from that of the published counts"] == ["c (fonts-one 1:2-1)"]


@pytest.mark.usefixtures("home")
def test_options_choose_fonts_and_classes(tmp_path: Path) -> None:
    fetch("glyphs", {**OPTIONS, "fonts": ["a", "b"], "num_classes": 4}, tmp_path / "raw")
    found = table(tmp_path / "raw")
    assert Counter(path.split("/")[0] for path in found) == dict.fromkeys(["U+4E00", "U+4E01", "U+4E03", "U+4E04"], 2)
    with pytest.raises(ConfigError, match="no font 'z'; fonts are a, b, c"):
        parse_dataset("glyphs", {"fonts": ["z"]})


def test_a_killed_fetch_leaves_nothing_behind_the_next_one(home: Path, tmp_path: Path) -> None:
    """The process is killed while it draws; no `finally` runs."""
    code = f"""if True:
        import os
        from pathlib import Path
        from dml_core.data.readers import glyphs
        glyphs.FONTS = {glyphs.FONTS!r}
        Path.home = lambda: Path({str(home)!r})
        glyphs.Glyphs(**{OPTIONS!r}).fetch(Path({str(tmp_path / "raw")!r}), lambda done, total: done > 3 and os._exit(9))
    """
    code = code.replace("Font(", "glyphs.Font(")
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == [".raw.partial", "home"]
    fetch("glyphs", OPTIONS, tmp_path / "raw")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "raw"]
    names = ["generator.txt", "images.csv", "images.zip", "licences", "sources.csv"]
    assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == names


def test_files_of_the_user_stay_and_faults_are_one_line(home: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "mine").write_text("mine")
    with pytest.raises(DataError, match="holds files that the generator did not write"):
        fetch("glyphs", OPTIONS, raw)
    assert [path.name for path in raw.iterdir()] == ["mine"]
    (raw / "mine").unlink()
    fetch("glyphs", OPTIONS, raw)
    images, packed = raw / "images.zip", (raw / "images.zip").read_bytes()
    images.write_bytes(packed.replace(b"PK\1\2\x14\x03\x14", b"PK\1\2\x14\x03\xff"))
    with pytest.raises(DataError, match=r"images\.zip: missing or damaged; remove .* and run `dml data fetch` again$"):
        Glyphs(**OPTIONS).read(raw)
    images.write_bytes(packed[:-9])
    with pytest.raises(DataError, match=r"images\.zip: missing or damaged; remove .* and run `dml data fetch` again$"):
        Glyphs(**OPTIONS).read(raw)
    deb = next((home / ".cache/dml-repro").glob("fonts-one*"))
    deb.write_bytes(deb.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"fonts-one.*\.deb: damaged; remove it and fetch again$"):
        fetch("glyphs", {**OPTIONS, "image_size": 20}, raw)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "raw"], "no unfinished folder stays"
    deb.unlink()
    put_deb(tmp_path / "home/other", "fonts-one", {}).rename(deb)
    with pytest.raises(DataError, match="leave the font 'c' out with the option 'fonts'"):
        fetch("glyphs", {**OPTIONS, "image_size": 20}, raw)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", ["images.csv", "sources.csv"])
def test_a_table_that_is_cut_or_changed_is_refused(name: str, tmp_path: Path) -> None:
    raw, dataset = tmp_path / "raw", Glyphs(**OPTIONS)
    fetch("glyphs", OPTIONS, raw)
    path, whole = raw / name, (raw / name).read_bytes()
    lines = whole.splitlines(keepends=True)
    for content in (b"".join(lines[:-1]), whole[:-3], whole.replace(b"c", b"d", 1), b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}: missing or damaged; remove .* and run `dml data fetch` again$"):
            dataset.notes(raw) if name == "sources.csv" else dataset.rows(raw)
    path.write_bytes(whole)
    assert dataset.rows(raw)
    assert dataset.notes(raw)


@pytest.mark.usefixtures("home")
def test_a_folder_of_an_earlier_version_is_read_and_drawn_again_by_the_next_fetch(tmp_path: Path) -> None:
    raw, dataset = tmp_path / "raw", Glyphs(**OPTIONS)
    fetch("glyphs", OPTIONS, raw)
    stamp, rows = (raw / "generator.txt").read_text(), dataset.rows(raw)
    (raw / "generator.txt").write_text("options\nhash of other code\n")
    assert dataset.rows(raw) == rows
    line = (raw / "images.csv").read_bytes().splitlines(keepends=True)[-1]
    (raw / "images.csv").write_bytes((raw / "images.csv").read_bytes()[: 4 - len(line)])
    with pytest.raises(DataError, match=r"images\.csv: missing or damaged"):
        dataset.rows(raw)
    fetch("glyphs", OPTIONS, raw)
    assert (raw / "generator.txt").read_text() == stamp
    assert dataset.rows(raw) == rows


@pytest.mark.slow
def test_real_fonts_draw_characters_that_differ(tmp_path: Path) -> None:
    options = {"fonts": ["maruberi", "kouzan", "gyosho"], "num_classes": 30, "least_images": 2}
    fetch("glyphs", options, tmp_path / "raw")
    prepare("glyphs", tmp_path / "raw", tmp_path / "out", options)
    train = PackedDataset(tmp_path / "out", "train")
    assert 8 <= len(train.class_names) <= 15
    ink = np.stack([train.image(index)[0].numpy() < 128 for index in range(len(train))])
    assert (ink.mean((1, 2)) > 0.02).all()
    assert (ink.mean((1, 2)) < 0.5).all()
    assert check_dataset("glyphs", tmp_path / "raw", options).violations == []
