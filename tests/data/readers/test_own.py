"""A person's own images: a directory per class, or a list."""

import io
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dml_core.config import ConfigError
from dml_core.data.prepare import prepare
from dml_core.data.readers.shared.lists import read_list
from dml_core.data.registry import parse_dataset
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import DataError


def image_file(path: Path, colour: int = 0, kind: str = "PNG") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(buffer, kind)
    path.write_bytes(buffer.getvalue())
    return path


def roles(name: str, raw: Path, **options: str) -> dict[str, str]:
    return {row.path: row.role for row in parse_dataset(name, options).read(raw).rows}


def test_classes_split_in_halves_by_name(tmp_path: Path) -> None:
    for name in ("ant", "bee", "cat"):
        for number in (1, 2):
            image_file(tmp_path / "raw" / name / f"{number}.png", colour=number)
            (tmp_path / "raw" / name / f"._{number}.png").write_text("macOS")
    image_file(tmp_path / "raw/ant/GIF.GIF", kind="GIF")
    assert set(roles("folder", tmp_path / "raw").values()) == {"train", "test"}
    prepare("folder", tmp_path / "raw", tmp_path / "out", {})
    train, test = (PackedDataset(tmp_path / "out", role) for role in ("train", "test"))
    assert train.paths == ["ant/1.png", "ant/2.png", "ant/GIF.GIF"]
    assert test.class_names == ["bee", "cat"]
    assert test.labels.tolist() == [0, 0, 1, 1]
    assert train.image(1)[:, 0, 0].tolist() == [2, 0, 0]
    assert train.box(0) is None


def test_role_folders_are_the_roles(tmp_path: Path) -> None:
    paths = ("train/a/1.png", "train/a/2.png", "query/b/1.png", "gallery/b/2.png", "gallery/c/3.png")
    for path in paths:
        image_file(tmp_path / path)
    assert roles("folder", tmp_path) == {path: path.split("/")[0] for path in paths}


@pytest.mark.parametrize("place", ["", "train/", "query/", "gallery/"])
def test_an_image_outside_the_classes_is_refused_in_any_part(tmp_path: Path, place: str) -> None:
    for path in ("train/a/1.png", "train/a/2.png", "query/b/1.png", "gallery/b/2.png"):
        image_file(tmp_path / path)
    (tmp_path / place / "notes.txt").write_text("")
    (tmp_path / place / "._1.png").write_text("macOS")
    assert len(roles("folder", tmp_path)) == 4
    image_file(tmp_path / place / "unsorted.png")
    with pytest.raises(DataError, match=f"/{place}unsorted.png: an image outside the folders of the classes; move it into one, or away"):
        roles("folder", tmp_path)


def test_a_class_that_is_called_train_is_a_class(tmp_path: Path) -> None:
    for path in ("train/1.png", "train/2.png", "plane/1.png", "plane/2.png"):
        image_file(tmp_path / path)
    assert roles("folder", tmp_path) == {"plane/1.png": "train", "plane/2.png": "train", "train/1.png": "test", "train/2.png": "test"}


def test_folder_problems_are_named(tmp_path: Path) -> None:
    image_file(tmp_path / "a/1.png")
    with pytest.raises(DataError, match="class 'a' has one image"):
        roles("folder", tmp_path)
    image_file(tmp_path / "a/2.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="/b: the class has no images"):
        roles("folder", tmp_path)
    (tmp_path / "b/notes.txt").write_text("")
    with pytest.raises(DataError, match=r"notes.txt: not the name of an image"):
        roles("folder", tmp_path)


@pytest.mark.parametrize("name", [b"\xff.png", b"../a note\xff"])
def test_a_name_that_is_not_utf8(name: bytes, tmp_path: Path) -> None:
    """Of any file: DVC, which hashes all of the folder, does not accept it."""
    image_file(tmp_path / "a/1.png")
    (tmp_path / "a" / os.fsdecode(name)).touch()
    with pytest.raises(DataError, match=r"the name of .*\\udcff.* is not UTF-8; rename the file") as error:
        roles("folder", tmp_path)
    assert str(error.value).encode()


HEADER = "path,label,role,left,top,right,bottom\n"


def listed(folder: Path, text: str) -> Path:
    for name in "1234":
        image_file(folder / f"{name}.png")
    (folder / "manifest.csv").write_text(text)
    return folder


def test_csv_with_roles_and_boxes(tmp_path: Path) -> None:
    raw = listed(tmp_path, HEADER + "1.png,007,train,0,0,2,3.5\n2.png,007,train,,,,\n3.png,8,query,,,,\n4.png,8,gallery,,,,\n")
    rows = parse_dataset("manifest", {}).read(raw).rows
    assert [(row.label_name, row.role, row.box) for row in rows] == [
        ("007", "train", (0.0, 0.0, 2.0, 3.5)),
        ("007", "train", None),
        ("8", "query", None),
        ("8", "gallery", None),
    ]


def test_only_an_empty_cell_is_empty(tmp_path: Path) -> None:
    """Countries and plants have such classes: NA is Namibia."""
    raw = listed(tmp_path, "path,label\n1.png,NA\n2.png,NA\n3.png,nan\n4.png,nan\n")
    assert [row.label_name for row in parse_dataset("manifest", {}).read(raw).rows] == ["NA", "NA", "nan", "nan"]


def test_a_long_list_with_cells_of_several_lines_is_read(tmp_path: Path) -> None:
    """A catalogue's descriptions; pyarrow reads a list in blocks of a megabyte, which may begin within such a cell."""
    description = "two, lines\n" * 9
    rows = [f'{number}.png,"cup\n{number}","{description}"' for number in range(20_000)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,description", *rows]))
    entries = read_list(tmp_path / "list.csv", is_dataset=False)
    assert [(entry.path, entry.label) for entry in entries] == [(f"{number}.png", f"cup\n{number}") for number in range(20_000)]


def test_parquet_without_roles(tmp_path: Path) -> None:
    listed(tmp_path, "")
    pq.write_table(pa.table({"path": ["1.png", "2.png", "3.png", "4.png"], "label": [10, 9, 10, 9]}), tmp_path / "list.parquet")
    assert roles("manifest", tmp_path, file="list.parquet") == {"1.png": "train", "2.png": "test", "3.png": "train", "4.png": "test"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label,rolle\n1.png,a,train\n", "unknown column 'rolle'"),
        ("path\n1.png\n", "column 'label' is missing"),
        ("path,label,label\n1.png,a,b\n", "column 'label' appears twice; remove one"),
        ("path,label\n1.png,\n", "column 'label' is missing or has empty cells"),
        ("path,label\n1.png,cat\n2.png,cat \n", "row 2 has the label 'cat ', which begins or ends with white space; remove it"),
        ("path,label\n1.png,cat\0\n", r"row 1 has the label 'cat\\x00' with a NUL character; remove it"),
        ("path,label,role\n1.png,a,test\n2.png,a,train\n", "class 'a' is in train and in test; classes must be disjoint"),
        ("path,label\n1.png\n", r"not readable as a table \(.*\); write CSV in UTF-8 with commas, or Parquet$"),
        ("", "not readable as a table"),
        (
            "path;label;role\n1.png;a;train\n",
            r"manifest\.csv: its columns are separated by ';'; write CSV in UTF-8 with commas, or Parquet$",
        ),
        ("path\tlabel\n1.png\ta\n", r"its columns are separated by '\\t'; write"),
        ("path,label\n", "no images"),
        ("path,label,role\n1.png,a,training\n", "row 1 has role 'training'"),
        ("path,label,role\n1.png,a,\n", "column 'role' is missing or has empty cells"),
        ("path,label,left\n1.png,a,3\n", "a box needs all"),
        (HEADER + "1.png,a,train,5,0,2,3\n", "row 1 has a box"),
        (HEADER + "1.png,a,train,5,,,\n", "row 1 has a box"),
        (HEADER + "1.png,a,train,wide,0,2,3\n", "not readable as a table"),
        (HEADER + "1.png,a,train,0,0,inf,inf\n", "image '1.png' has a box with a side that is not a finite number"),
        ("path,label\n../1.png,a\n2.png,a\n", "leads out of the folder"),
        ("path,label\n1.png,a\n1.png,a\n", "listed 2 times"),
    ],
)
def test_list_problems_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as error:
        roles("manifest", listed(tmp_path, text))
    assert "\n" not in str(error.value)


NAN = float("nan")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"path": [1, 2]}, "column 'path' has values of type int64; write text"),
        ({"path": [b"1.png", b"2.png"]}, "column 'path' has values of type binary; write text"),
        ({"label": [b"a", b"a"]}, "column 'label' has values of type binary; write text or integers"),
        ({"label": [["a"], ["a"]]}, "column 'label' has values of type list"),
        ({"label": [0.5, NAN]}, "column 'label' has values of type double"),
        ({"label": ["", "a"]}, "column 'label' is missing or has empty cells"),
        ({"role": [1, 1]}, "column 'role' has values of type int64; write text"),
        (
            {"left": ["0", "x"], "top": ["0", "0"], "right": ["2", "2"], "bottom": ["2", "2"]},
            "column 'left' has values of type string; write numbers",
        ),
        (
            {"left": [0.0, NAN], "top": [0.0, NAN], "right": [2.0, NAN], "bottom": [2.0, NAN]},
            "image '2.png' has a box with a side",
        ),
    ],
)
def test_parquet_problems_are_one_line(columns: dict[str, list[object]], message: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"path": ["1.png", "2.png"], "label": ["a", "a"]} | columns), listed(tmp_path, "") / "list.parquet")
    with pytest.raises(DataError, match=message) as error:
        roles("manifest", tmp_path, file="list.parquet")
    assert "\n" not in str(error.value)


def test_a_parquet_file_whose_text_is_not_utf8_is_refused(tmp_path: Path) -> None:
    latin1 = pa.array([b"\xe91", b"\xe92"]).view(pa.string())
    pq.write_table(pa.table({"path": ["1.png", "2.png"], "label": latin1}), listed(tmp_path, "") / "list.parquet")
    with pytest.raises(DataError, match=r"list\.parquet: not readable as a table \(.*UTF"):
        roles("manifest", tmp_path, file="list.parquet")


def test_parquet_with_categories_and_empty_columns(tmp_path: Path) -> None:
    columns = {"path": ["1.png", "2.png"], "label": pa.array(["a", "a"]).dictionary_encode()}
    empty = dict.fromkeys(("left", "top", "right", "bottom"), pa.nulls(2))
    pq.write_table(pa.table(columns | {"role": pa.array(["train"] * 2).dictionary_encode()} | empty), listed(tmp_path, "") / "list.parquet")
    assert roles("manifest", tmp_path, file="list.parquet") == {"1.png": "train", "2.png": "train"}


def test_missing_list_and_unknown_option(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest.csv: no such file"):
        roles("manifest", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'file'"):
        parse_dataset("manifest", {"fille": "x"})


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def outside(path: Path) -> Path:
    return next(folder for folder in path.parents if folder.name == "raw").with_name("pipe")


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": _pipe,
    "a link to a pipe": lambda path: (os.mkfifo(outside(path)), path.symlink_to(outside(path))),
    "a socket": _socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("place", ["a/9.png", "a/.hidden", "train.csv"])
@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize("reader", ["folder", "manifest"])
def test_a_raw_folder_with_anything_but_files_is_refused_at_once(what: str, place: str, reader: str, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for name in "abcd":
        (raw / name).mkdir(parents=True)
        for number in range(2):
            (raw / name / f"{number}.png").write_bytes(b"x")
    rows = [f"{path.relative_to(raw)},{path.parent.name}" for path in sorted(raw.rglob("*.png"))]
    (raw / "manifest.csv").write_text("\n".join(["path,label", *rows]))
    parse_dataset(reader, {}).read(raw)
    NO_FILES[what](raw / place)
    with pytest.raises(DataError, match="remove it"):
        parse_dataset(reader, {}).read(raw)


def test_a_link_to_a_folder_is_refused_but_as_the_raw_folder_itself(tmp_path: Path) -> None:
    """Changes behind such a link would not be noticed: DVC does not look there."""
    for name in "abcd":
        (tmp_path / "elsewhere" / name).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "elsewhere" / name / f"{number}.png").write_bytes(b"x")
    (tmp_path / "raw").symlink_to(tmp_path / "elsewhere")
    assert len(parse_dataset("folder", {}).read(tmp_path / "raw").rows) == 8
    (tmp_path / "elsewhere" / "d" / "2.png").symlink_to(tmp_path / "elsewhere" / "a" / "0.png")
    assert len(parse_dataset("folder", {}).read(tmp_path / "raw").rows) == 9
    for name, target in (("e", tmp_path / "elsewhere" / "a"), ("back", tmp_path)):
        link = tmp_path / "raw" / "d" / name
        link.symlink_to(target)
        with pytest.raises(DataError, match=f"{link}: a link to a folder, whose changes DVC does not notice"):
            parse_dataset("folder", {}).read(tmp_path / "raw")
        link.unlink()


@pytest.mark.parametrize("file", ["../list.csv", "below/../../list.csv", "/list.csv"])
def test_a_list_outside_of_the_raw_folder_is_refused(file: str) -> None:
    """Its changes would not be noticed: DVC does not look there."""
    with pytest.raises(ConfigError, match=f"'{file}' leads out of the raw folder, and DVC does not notice changes there"):
        parse_dataset("manifest", {"file": file})
    assert parse_dataset("manifest", {"file": "below/list.csv"})
