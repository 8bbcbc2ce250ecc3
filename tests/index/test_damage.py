"""Every kind of file of an index x every kind of damage: a one-line error or the right result; a damaged index is never changed.

The cases come from the files of a real index, so that a new kind of file without a pattern fails.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dml_core.errors import ConfigError, DmlError, StoreError
from dml_core.files import sealed
from dml_core.index.index import Index
from dml_core.index.items import SCHEMA
from dml_core.index.layout import APPROXIMATE, INFO_FILE, ITEMS, LOCK_FILE, commit
from dml_core.index.writing import add_items, build_index, remove_items
from tests.index.test_index import KINDS, MODEL, batches, built, rows

QUERIES = rows(5, seed=1)
NUM_PLACES = 24  # positions per file at which a bit is flipped; the proof test has one every few bytes
PROVED = ("index.json", "vectors-*.f32", "items-*.arrow", "approximate-*.faiss")
UNREAD = (LOCK_FILE,)  # its content has no meaning


@pytest.fixture(scope="module", params=[None, "ivf", "pq", "hnsw"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexes") / "whole"
    built(folder, rows(300), request.param)
    return folder


def answer(folder: Path) -> tuple[Any, ...]:
    """Return everything that an index reports."""
    index = Index.open(folder)
    scores, positions = index.search(QUERIES, 5)
    return index.info, scores.tolist(), [index.item(position) for position in positions.ravel().tolist()], index.names()


def kinds(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield each file and whether its content is verified; fail for a file of an unknown kind."""
    for path in sorted(folder.iterdir()):
        proved, unread = (any(fnmatch(path.name, pattern) for pattern in patterns) for patterns in (PROVED, UNREAD))
        assert proved != unread, f"{path.name}: a kind of file that has no row here"
        yield path, proved


def flipped(path: Path, at: int, by: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= by
    path.write_bytes(data)


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "two bytes short": lambda path: os.truncate(path, max(0, path.stat().st_size - 2)),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0") and None,
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: instead(path, Path.mkdir),
    "a pipe": lambda path: instead(path, os.mkfifo),
    "a link to nothing": lambda path: instead(path, lambda place: place.symlink_to("nowhere")),
    "a link to itself": lambda path: instead(path, lambda place: place.symlink_to(place.name)),
}


def check(folder: Path, expected: tuple[Any, ...], what: str) -> None:
    """Assert the same result, or a one-line error that names the folder and the solution."""
    try:
        assert answer(folder) == expected, what
        return
    except DmlError as error:
        said = str(error)
    assert "\n" not in said, what
    assert str(folder) in said, what
    assert any(words in said for words in ("build the index again", "no index there")), what


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line_and_a_damaged_index_stays_as_it_is(whole: Path, tmp_path: Path, damage: str) -> None:
    expected = answer(whole)
    num_proved = 0
    for number, (path, proved) in enumerate(kinds(whole)):
        folder = tmp_path / str(number) / "index"
        shutil.copytree(whole, folder)
        DAMAGES[damage](folder / path.name)
        if not proved:
            assert answer(folder) == expected
            with suppress(StoreError):  # fails if the damage replaced the lock file
                assert remove_items(folder, ["0.png"]).num_items == 299
            continue
        num_proved += 1
        with pytest.raises((StoreError, ConfigError), match=r"^[^\n]*(build the index again|no index there)[^\n]*$"):
            Index.open(folder)
        before = listing(folder)
        for change in (lambda f=folder: add_items(f, batches(rows(3), first=900), MODEL), lambda f=folder: remove_items(f, ["0.png"])):
            with pytest.raises((StoreError, ConfigError), match=r"^[^\n]+$"):
                change()
        assert listing(folder) == before
    assert num_proved == (3 if expected[0].kind == "exact" else 4)


def listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((path.name, path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.iterdir() if path.name != LOCK_FILE)


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_a_flipped_bit_changes_no_answer(whole: Path, tmp_path: Path, everywhere: bool) -> None:
    expected = answer(whole)
    generator = np.random.default_rng(0)
    for number, (path, _) in enumerate(kinds(whole)):
        folder = tmp_path / str(number) / "index"
        shutil.copytree(whole, folder)
        size = path.stat().st_size
        step = max(1, size // NUM_PLACES) if not everywhere else 1 if path.name == INFO_FILE else 11
        places = [*range(0, size, step), *([size - 1] if size else [])]
        for at in places:
            by = 1 << int(generator.integers(8))
            flipped(folder / path.name, at, by)
            check(folder, expected, f"bit {by} of byte {at} of {path.name}")
            flipped(folder / path.name, at, by)
    check(folder, expected, "whole again")


def test_a_damaged_index_can_be_built_again(whole: Path, tmp_path: Path) -> None:
    """The solution in the error message works for every damage; if building fails, the files remain."""
    for damage, place in ((damage, place) for damage in DAMAGES for place in (INFO_FILE, "vectors-*", "items-*")):
        folder = tmp_path / f"{damage} {place.strip('-*')}"
        shutil.copytree(whole, folder)
        DAMAGES[damage](next(folder.glob(place)))
        names = sorted(path.name for path in folder.iterdir())
        with pytest.raises(ConfigError, match="nothing to index"):
            build_index(folder, [], MODEL, replace=True)
        assert sorted(path.name for path in folder.iterdir()) == names
        try:
            assert build_index(folder, batches(rows(40)), MODEL, replace=True).num_items == 40
        except StoreError as error:
            assert (damage, place) == ("a folder", INFO_FILE)  # no program removes a folder made by a user
            assert "cannot be written" in str(error)  # noqa: PT017
        else:
            assert Index.open(folder).num_items == 40


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 4}, r"written by a newer version \(format 4, this program reads up to 3\); update this program"),
        ({"format": "2"}, "damaged"),
        ({"format": 0}, "damaged"),
        ({"colour": "red"}, "damaged"),
        ({"num_items": 10**30}, "items|bytes"),
        ({"num_items": -1}, "damaged"),
        ({"version": "../../../etc/passwd"}, "damaged"),
        ({"files_sha256": {}}, "damaged"),
        ({"kind": "annoy"}, "damaged"),
    ],
)
def test_what_a_description_must_not_say(whole: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Rejected even with a matching hash."""
    folder = tmp_path / "index"
    shutil.copytree(whole, folder)
    values = json.loads((folder / INFO_FILE).read_text())
    values.pop("sha256")
    (folder / INFO_FILE).write_text(sealed(values | changes))
    with pytest.raises(StoreError, match=rf"^{folder}[^\n]*({said})[^\n]*$"):
        Index.open(folder)


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '"x"', "[" * 5000, "{" * 5000, "\ufeff{}", '{"format": 1}', "{}", "\0", "nan"])
def test_a_description_that_is_none(whole: Path, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "index"
    shutil.copytree(whole, folder)
    (folder / INFO_FILE).write_text(text)
    with pytest.raises(StoreError, match=r"^[^\n]*damaged[^;]*; build the index again with --force$"):
        Index.open(folder)


def forged(offsets: list[int]) -> pa.Table:
    """Return as items three whose thumbnails are at `offsets` of their file's data, which has three bytes."""
    places, data = (pa.py_buffer(part) for part in (np.array(offsets).tobytes(), b"abc"))
    thumbnails = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 3, [None, places, data])
    return pa.table([pa.array([["0", "1", "2"], [None] * 3][at], pa.large_string()) for at in (0, 1)] + [thumbnails], schema=SCHEMA)


FORGED_ITEMS = {
    "a thumbnail of the process's memory": forged([0, 100, 100, 3]),
    "a thumbnail of a gigabyte": forged([0, 1 << 30, 1 << 30, 3]),
    "a thumbnail before the data": forged([0, -(1 << 20), 1, 3]),
    "numbers for names": pa.table({"name": [1, 2, 3], "class_name": ["a"] * 3, "thumbnail": [b"a"] * 3}),
    "no thumbnails": forged([0, 1, 2, 3]).drop_columns("thumbnail"),
}


@pytest.mark.parametrize("name", FORGED_ITEMS)
def test_forged_items_with_the_right_hash_are_refused(tmp_path: Path, name: str) -> None:
    index = built(tmp_path / "index", rows(3))
    path = index.info.path(index.folder, ITEMS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, FORGED_ITEMS[name].schema) as writer:
        writer.write_table(FORGED_ITEMS[name])
    commit(index.folder, index.info)
    with pytest.raises(StoreError, match=rf"^{path}: damaged \([^\n]+\); build the index again with --force$"):
        Index.open(index.folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_items", "num_dimensions"), [(301, 16), (300, 8)])
def test_an_approximate_index_of_other_vectors_is_refused(tmp_path: Path, kind: str, num_items: int, num_dimensions: int) -> None:
    index = built(tmp_path / "index", rows(300), kind)
    other = built(tmp_path / "other", rows(num_items, num_dimensions), kind)
    path = index.info.path(index.folder, APPROXIMATE)
    shutil.copyfile(other.info.path(other.folder, APPROXIMATE), path)
    commit(index.folder, index.info)
    with pytest.raises(StoreError, match=rf"^{path}: of other vectors than the index has; build the index again with --force$"):
        Index.open(index.folder)


def test_an_index_of_before_hashes_is_to_be_built_again(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    shutil.copytree(whole, folder)
    info = Index.open(folder).info.model_dump(mode="json")
    del info["files_sha256"]
    (folder / INFO_FILE).write_text(json.dumps(info | {"format": 1}))
    with pytest.raises(StoreError, match=r"index\.json: damaged[^;]*; build the index again with --force$"):
        Index.open(folder)
