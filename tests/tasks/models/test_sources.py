"""Sources of images: values of a row without a box, and links in a circle."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dml_core.data.readers.shared.own import guess_reader
from dml_core.errors import DataError
from tasks.models.sources import find_images


def test_a_row_without_a_box_is_the_whole_image_and_the_others_keep_theirs(tmp_path: Path) -> None:
    rows = ["path,left,top,right,bottom", "a.png,1,2,3,4", "b.png,,,,"]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    assert find_images(str(tmp_path / "list.csv")).boxes == [(1.0, 2.0, 3.0, 4.0), None]


def test_a_list_may_have_a_suffix_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "LIST.CSV").write_text("path,label\na.png,a\n")
    assert find_images(str(tmp_path / "LIST.CSV")).classes == ["a"]
    assert guess_reader(tmp_path / "LIST.CSV", None) == ("manifest", tmp_path, {"file": "LIST.CSV"})
    pq.write_table(pa.table({"path": ["b.png"]}), tmp_path / "LIST.PARQUET")
    assert find_images(str(tmp_path / "LIST.PARQUET")).names == ["b.png"]


def test_a_class_called_na_is_a_class(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label\na.png,NA\nb.png,null\n")
    assert find_images(str(tmp_path / "list.csv")).classes == ["NA", "null"]


def test_links_in_a_circle_through_each_other_are_followed_once(tmp_path: Path) -> None:
    """Each of three folders links to the two others: followed to the system's limit of 40 links, this would not end."""
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.png").touch()
        for other in set("abc") - {name}:
            (tmp_path / name / f"to_{other}").symlink_to(tmp_path / other)
    names = find_images(str(tmp_path)).names
    assert len(names) == len(set(names)) == 15, "each folder, its two links, and the link of each of them that leads to the third"
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "all").symlink_to(tmp_path / "a")
    assert "a.png" in find_images(str(tmp_path / "up" / "all")).names


@pytest.mark.parametrize(("name", "problem"), [("there.png", "neither a folder nor a list"), ("none", "no such folder")])
def test_what_is_no_source_is_named(name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "there.png").touch()
    with pytest.raises(DataError, match=f"{name}: {problem}; name a folder of images"):
        find_images(str(tmp_path / name))


def test_files_that_are_no_images_are_counted_by_suffix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a/1.JFIF", "a/2.avif", "b/3.heic", "b/4.HEIC", "b/notes", "list.c\nsv", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_images(str(tmp_path)).names == ["a/1.JFIF", "a/2.avif"]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == f"{tmp_path}: left out 4 files without an image's suffix (.c sv 1, .heic 2, none 1)"
    caplog.clear()
    assert find_images(str(tmp_path / "a")).names == ["1.JFIF", "2.avif"]
    assert not caplog.records


def test_images_without_a_folder_that_take_the_classes_of_the_others_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a/1.jpg", "a/2.jpg", "b/1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_images(str(tmp_path)).classes == ["a", "a", "b"]
    assert find_images(str(tmp_path / "a")).classes is None
    assert not caplog.records
    (tmp_path / "cover.png").touch()
    assert find_images(str(tmp_path)).classes is None
    (line,) = (record.getMessage() for record in caplog.records)
    because = "because of 1 image outside of its folders (the first: cover.png)"
    assert line == f"{tmp_path}: no image gets a class {because}; for classes move all images into folders"
