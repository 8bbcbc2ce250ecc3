"""Sealed files: after any damage a file is read as written, refused by name, or set aside, but never trusted or overwritten."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dml_core.files import set_aside
from tasks.files import files_set_aside, write_whole
from tasks.runs.records import Record
from tasks.sealed import (
    FORMAT,
    DamagedError,
    NewerFormatError,
    check_formats,
    parse_sealed,
    read_or_set_aside,
    read_sealed,
    seal,
    unseal,
    write_sealed,
)
from tests.damage import as_format


class Inner(Record):
    """A nested record."""

    name: str


class Note(Record):
    """A small record."""

    number: int
    inner: tuple[Inner, ...] = ()


WRITTEN = Note(number=7, inner=(Inner(name="ä"),))
DATA = seal(WRITTEN.model_dump_json()).encode()


def test_a_written_file_is_read_and_says_its_format(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "note.json"
    assert read_sealed(path, Note) is None
    write_sealed(path, WRITTEN)
    assert read_sealed(path, Note) == WRITTEN
    assert json.loads(path.read_bytes())["format"] == FORMAT
    assert [file.name for file in path.parent.iterdir()] == ["note.json"]


@given(st.integers(0, 8 * len(DATA) - 1))
@settings(max_examples=300, deadline=None)
def test_no_flipped_bit_changes_what_is_read(bit: int) -> None:
    data = bytearray(DATA)
    data[bit // 8] ^= 1 << bit % 8
    with suppress(DamagedError):
        assert parse_sealed(Path("x"), bytes(data), Note) == WRITTEN  # a bit of white space, or of a letter in an escape sequence


@pytest.mark.parametrize(
    "data",
    [DATA[:cut] for cut in (0, 1, len(DATA) // 2, len(DATA) - 1)]
    + [b"null", b"[]", b"{}", b"7", b"\xff", b"[" * 10_000, DATA.replace(b'"format": 1, ', b"")],
)
def test_what_is_not_a_sealed_file_is_damaged(data: bytes) -> None:
    with pytest.raises(DamagedError, match=r"^x: damaged$"):
        parse_sealed(Path("x"), data, Note)


@pytest.mark.parametrize("newer", [FORMAT + 1, 10**30])
def test_a_newer_format_is_refused_by_name_and_stays(tmp_path: Path, newer: int) -> None:
    path = tmp_path / "note.json"
    path.write_text(as_format(seal('{"another": "record"}'), newer))
    before = path.read_bytes()
    with pytest.raises(
        NewerFormatError, match=rf"note\.json: written by a newer version \(format {newer}, this program reads up to {FORMAT}\)"
    ):
        read_or_set_aside(path, Note)
    assert path.read_bytes() == before
    path.write_text(path.read_text().replace(str(newer), str(newer + 1)))
    with pytest.raises(DamagedError):
        read_sealed(path, Note)


@pytest.mark.parametrize("folder", ["tables/project", "outbox", "made"])
def test_a_state_of_a_newer_version_is_refused_before_any_work(tmp_path: Path, folder: str) -> None:
    check_formats(tmp_path)
    path = tmp_path / folder / "x.json"
    write_sealed(path, WRITTEN)
    (path.parent / "damaged.json").write_text("{")
    check_formats(tmp_path)
    path.write_text(as_format(path.read_text(), 2))
    with pytest.raises(NewerFormatError, match=r"x\.json: written by a newer version"):
        check_formats(tmp_path)


def test_fields_that_a_newer_program_added_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_text(seal('{"number": 7, "digest": "abc", "inner": [{"name": "a", "more": [1]}]}'))
    found = read_sealed(path, Note)
    assert found is not None
    write_sealed(path, found.model_copy(update={"number": 8}))
    assert json.loads(unseal(path.read_bytes())) == {"number": 8, "digest": "abc", "inner": [{"name": "a", "more": [1]}]}


def test_damaged_files_folders_and_links_are_kept_under_other_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(b"first")
    assert read_or_set_aside(path, Note) is None
    path.mkdir()
    (path / "inside").write_bytes(b"second")
    assert read_or_set_aside(path, Note) is None
    path.symlink_to(tmp_path / "nowhere")
    assert read_or_set_aside(path, Note) is None
    path.symlink_to(path)
    assert read_or_set_aside(path, Note) is None
    assert [one.name for one in files_set_aside(tmp_path)] == [f"note.json.damaged-{number}" for number in (1, 2, 3, 4)]
    assert (tmp_path / "note.json.damaged-1").read_bytes() == b"first"
    assert (tmp_path / "note.json.damaged-2" / "inside").read_bytes() == b"second"
    assert (tmp_path / "note.json.damaged-3").readlink() == tmp_path / "nowhere"
    assert caplog.records[0].getMessage() == f"{path}: damaged; kept as note.json.damaged-1"
    assert len(caplog.records) == 4


def test_of_two_who_find_the_same_damage_one_renames_and_the_other_reads_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    for _ in range(20):
        path.write_bytes(b"damaged")
        with ThreadPoolExecutor(2) as readers:
            assert list(readers.map(read_or_set_aside, [path, path], [Note, Note])) == [None, None]
        assert not path.exists()
    assert len(files_set_aside(tmp_path)) == 20


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path, texts = tmp_path / "file", [letter * 200_000 for letter in "abcd"]
    writers = [threading.Thread(target=lambda text=text: [write_whole(path, text) for _ in range(10)]) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert path.read_text() in texts
    assert path.read_text() in texts
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(path, "text")
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_names_of_what_is_set_aside_are_not_used_again(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / "x").write_text(str(number))
        assert set_aside(tmp_path / "x").name == f"x.damaged-{number}"
    (tmp_path / "x.damaged-2").unlink()
    (tmp_path / "x").write_text("4")
    assert set_aside(tmp_path / "x").name == "x.damaged-2"
