"""Packing: the input images come out unchanged, the same every time, completely or not at all."""

import errno
import json
import os
import signal
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dml_core.config import ConfigError
from dml_core.data import prepare as prepare_module
from dml_core.data.prepare import prepare
from dml_core.data.readers.shared.contract import DatasetConfig
from dml_core.data.registry import materialise
from dml_core.data.store.decode import decode_rgb
from dml_core.data.store.info import read_info
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Row
from dml_core.errors import DataError, StoreError
from tests.data.conftest import OPTIONS
from tests.forked import forked_on_small_disk

FILES = ("images.arrow", "manifest.parquet", "dataset.json")


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    materialise("synthetic", OPTIONS, folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def first_image(raw: Path) -> Path:
    return sorted((raw / "CUB_200_2011" / "images").rglob("*.jpg"))[0]


def test_same_raw_files_give_the_same_bytes(raw: Path, tmp_path: Path) -> None:
    prepare("synthetic", raw, tmp_path / "a", OPTIONS)
    prepare("synthetic", raw, tmp_path / "b", OPTIONS)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_one_changed_image_changes_the_fingerprint(raw: Path, packed_synthetic: Path, tmp_path: Path) -> None:
    path = first_image(raw)
    path.write_bytes(path.read_bytes() + b"\0")
    assert prepare("synthetic", raw, tmp_path / "out", OPTIONS).fingerprint != read_info(packed_synthetic).fingerprint


def test_info_says_what_was_packed(packed_synthetic: Path) -> None:
    info = read_info(packed_synthetic)
    assert {role: (c.num_images, c.num_classes) for role, c in info.roles.items()} == {"train": (15, 3), "test": (15, 3)}
    assert info.num_classes == 6
    assert info.options["seed"] == OPTIONS["seed"]
    assert info.options["num_modes"] == 4, "defaults are written out"


def test_manifest_has_original_order_names_and_boxes(packed_synthetic: Path, raw_synthetic: Path) -> None:
    table = pq.read_table(packed_synthetic / "manifest.parquet").to_pydict()
    root = raw_synthetic / "CUB_200_2011"
    assert table["path"] == [line.split()[1] for line in (root / "images.txt").read_text().splitlines()]
    assert table["label"] == [index // 5 for index in range(30)]
    x, y, width, height = (float(n) for n in (root / "bounding_boxes.txt").read_text().splitlines()[7].split()[1:])
    assert table["box"][7] == [x, y, x + width, y + height]


def test_progress_ends_with_all_images(raw: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    prepare("synthetic", raw, tmp_path / "out", OPTIONS, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (30, 30)


@pytest.mark.parametrize("damage", [b"", b"not an image", b"\xff\xd8 neither", b"\x89PNG nor this"])
def test_unreadable_image_is_named_and_nothing_is_left(raw: Path, tmp_path: Path, damage: bytes) -> None:
    first_image(raw).write_bytes(damage)
    with pytest.raises(DataError, match=first_image(raw).name):
        prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_truncated_jpeg_is_refused(raw: Path, tmp_path: Path) -> None:
    path = first_image(raw)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="truncated"):
        prepare("synthetic", raw, tmp_path / "out", OPTIONS)


def test_failure_leaves_the_former_dataset(raw: Path, tmp_path: Path) -> None:
    prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    before = contents(tmp_path / "out")
    first_image(raw).write_bytes(b"")
    with pytest.raises(DataError):
        prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    assert contents(tmp_path / "out") == before


def test_the_same_images_and_rows_keep_their_identity_with_another_pyarrow(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest has other bytes: `created_by` names its version; everything was trained again."""
    info, before = prepare("synthetic", raw, tmp_path / "out", OPTIONS), contents(tmp_path / "out")
    monkeypatch.setattr(pq, "write_table", partial(pq.write_table, compression="gzip"))
    elsewhere = prepare("synthetic", raw, tmp_path / "elsewhere", OPTIONS)
    assert elsewhere.manifest_sha256 != info.manifest_sha256
    assert prepare("synthetic", raw, tmp_path / "out", OPTIONS) == info
    assert contents(tmp_path / "out") == before
    names = raw / "CUB_200_2011/classes.txt"
    names.write_text(names.read_text().replace("1 ", "1 renamed-", 1))
    renamed = prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    assert (renamed.images_sha256 == info.images_sha256, renamed.fingerprint == info.fingerprint) == (True, False)
    assert renamed == read_info(tmp_path / "out")


def test_a_former_dataset_and_a_killed_attempt_are_replaced(raw: Path, tmp_path: Path) -> None:
    for leftover in ("out", ".out.partial", ".out.replaced"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "dataset.json").write_text("{}")
    prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]
    assert read_info(tmp_path / "out").num_classes == 6


def tree(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


FOREIGN = {
    "a file": lambda folder: folder.write_text("mine"),
    "another file": lambda folder: (folder.mkdir(), (folder / "notes.txt").write_text("mine")),
    "a folder": lambda folder: (folder / "mine").mkdir(parents=True),
    "a folder with the name of a file": lambda folder: (folder / "images.arrow").mkdir(parents=True),
    "beside packed data": lambda folder: (prepare("synthetic", folder.parent / "raw", folder, OPTIONS), (folder / "x").write_text("mine")),
}


@pytest.mark.parametrize("place", ["out", ".out.partial", ".out.replaced"])
@pytest.mark.parametrize("what", FOREIGN)
def test_what_prepare_did_not_write_is_neither_removed_nor_replaced(raw: Path, tmp_path: Path, what: str, place: str) -> None:
    FOREIGN[what](tmp_path / place)
    before = tree(tmp_path)
    with pytest.raises(StoreError, match="move it away"):
        prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    assert tree(tmp_path) == before


def test_the_former_dataset_is_put_back_if_the_new_one_cannot_take_its_place(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    before, rename = contents(tmp_path / "out"), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == ".out.partial":
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StoreError, match="cannot be written"):
        prepare("synthetic", raw, tmp_path / "out", OPTIONS | {"seed": 9})
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]


def test_a_link_to_packed_data_stays_and_the_data_are_replaced(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk/packed")
    for _ in range(2):
        prepare("synthetic", raw, tmp_path / "out", OPTIONS)
        assert (tmp_path / "out").is_symlink()
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["packed"]
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/cat.jpg").write_text("mine")
    (tmp_path / "linked").symlink_to(tmp_path / "pictures")
    with pytest.raises(StoreError, match=r"holds 'cat\.jpg'"):
        prepare("synthetic", raw, tmp_path / "linked", OPTIONS)
    assert (tmp_path / "pictures/cat.jpg").read_text() == "mine"


def test_packed_data_with_a_damaged_description_are_replaced(raw: Path, tmp_path: Path) -> None:
    prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "dataset.json").write_text("{")
    prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    assert contents(tmp_path / "out") == before


def fill_the_disk(raw: Path, out: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        prepare("synthetic", raw, out, OPTIONS)


@pytest.mark.parametrize("num_bytes", [0, 3000, 20_000])
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(raw: Path, tmp_path: Path, num_bytes: int) -> None:
    """The kernel does not let any file of a process grow above the limit."""
    assert forked_on_small_disk(num_bytes, fill_the_disk, raw, tmp_path / "out") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def killed_after(num_images: int, raw: Path, out: Path) -> None:
    """Pack in a process that kills itself with SIGKILL after packing `num_images` images."""

    def maybe_die(done: int, _: int) -> None:
        if done >= num_images:
            os.kill(os.getpid(), signal.SIGKILL)

    process = get_context("fork").Process(target=prepare, args=("synthetic", raw, out, OPTIONS, maybe_die))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()


def test_a_killed_attempt_is_taken_up_again(raw: Path, packed_synthetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_NUM_ROWS_PER_BATCH", 4)
    undisturbed = tmp_path / "undisturbed"
    prepare("synthetic", raw, undisturbed, OPTIONS)
    killed_after(20, raw, tmp_path / "out")
    killed_after(8, raw, tmp_path / "out")
    changed = first_image(raw)
    changed.write_bytes(changed.read_bytes() + b"\0")
    decoded: list[bytes] = []
    monkeypatch.setattr(prepare_module, "decode_rgb", lambda data: decoded.append(data) or decode_rgb(data))
    prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    assert len(decoded) == 30 - 20 + 1, "what was packed before and has not changed is not decoded again"
    changed.write_bytes(changed.read_bytes()[:-1])
    prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    assert contents(tmp_path / "out") == contents(undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw", "undisturbed"]


def test_after_ctrl_c_the_packed_images_are_not_decoded_again(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_NUM_ROWS_PER_BATCH", 4)

    def interrupt(done: int, _: int) -> None:
        if done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("synthetic", raw, tmp_path / "out", OPTIONS, interrupt)
    decoded: list[bytes] = []
    monkeypatch.setattr(prepare_module, "decode_rgb", lambda data: decoded.append(data) or decode_rgb(data))
    prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    assert len(decoded) == 30 - 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]


def test_images_that_arrow_splits_because_they_exceed_two_gibibytes_are_packed(
    raw: Path, packed_synthetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pyarrow.array` returns several chunks above 2 GiB; here it does so for any images."""
    whole, before = pa.array, pq.read_table(packed_synthetic / "manifest.parquet")

    def split(values: list[bytes], kind: pa.DataType) -> pa.ChunkedArray:
        return pa.chunked_array([whole(values[:20], kind), whole(values[20:], kind)])

    monkeypatch.setattr(prepare_module.pa, "array", split)
    prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    monkeypatch.undo()
    assert pq.read_table(tmp_path / "out/manifest.parquet") == before
    for role in ("train", "test"):
        packed, expected = (PackedDataset(folder, role) for folder in (tmp_path / "out", packed_synthetic))
        assert [packed.raw_bytes(index) for index in range(len(packed))] == [expected.raw_bytes(index) for index in range(len(expected))]


def test_unwritable_place(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        prepare("synthetic", raw, tmp_path / "file" / "out", OPTIONS)


def test_unknown_dataset_and_option_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'synthetic'"):
        prepare("syntetic", tmp_path, tmp_path / "out", {})
    with pytest.raises(ConfigError, match="did you mean 'num_classes'"):
        prepare("synthetic", tmp_path, tmp_path / "out", {"num_clases": 3})


def test_missing_and_foreign_packed_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prepared dataset"):
        read_info(tmp_path)
    (tmp_path / "dataset.json").write_text(json.dumps({"format": 3}))
    with pytest.raises(DataError, match=r"written by a newer version \(format 3, this program reads up to 2\)"):
        read_info(tmp_path)


def test_every_changed_byte_of_a_description_is_found(raw: Path, tmp_path: Path) -> None:
    """This includes counts and options, which no hash of the images or of the manifest covers."""
    written = prepare("synthetic", raw, tmp_path / "out", OPTIONS)
    path = tmp_path / "out/dataset.json"
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with suppress(DataError):  # a changed space has no effect
            assert read_info(tmp_path / "out") == written


class Listed(DatasetConfig):
    """A dataset with the rows given by the test."""

    listed: tuple[tuple[str, int, str, str], ...]

    def rows(self, raw: Path) -> list[Row]:
        return [Row(path, label, name, role) for path, label, name, role in self.listed]  # type: ignore[arg-type]


GOOD = (("a1", 1, "a", "train"), ("a2", 1, "a", "train"), ("b1", 2, "b", "test"), ("b2", 2, "b", "test"))


def test_good_rows_pass(tmp_path: Path) -> None:
    assert len(Listed(listed=GOOD).read(tmp_path).rows) == 4


@pytest.mark.parametrize("name", ["Screenshot 9.41.00\u202fAM", "\u3000", "می\u200cخواهم", "日本", "e\u0301", "a b"])
def test_names_of_every_script_are_accepted(tmp_path: Path, name: str) -> None:
    assert len(Listed(listed=(*GOOD, (name, 1, "a", "train"))).read(tmp_path).rows) == 5


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("a1", 1, "a", "train"), "listed 2 times"),
        (("./a1", 1, "a", "train"), "listed 2 times"),
        (("../a3", 1, "a", "train"), "leads out of the folder"),
        (("/a3", 1, "a", "train"), "leads out of the folder"),
        (("a\udcff3", 1, "a", "train"), "not printable UTF-8"),
        (("a\n3", 1, "a", "train"), "not printable UTF-8"),
        (("a\u20283", 1, "a", "train"), "not printable UTF-8"),
        (("a3", 1, "other", "train"), "two names"),
        (("a3", 1, "a", "test"), "must be disjoint"),
        (("c1", 3, "c", "test"), "has one image in test"),
        (("c1", 3, "c", "train"), "has one image in train"),
        (("c1", 3, "c", "query"), "has images in query, test; besides train, use either test, or query and gallery"),
        (("c1", 3, "c", "gallery"), "has images in gallery, test; besides train"),
    ],
)
def test_rules_of_every_dataset(tmp_path: Path, extra: tuple[str, int, str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Listed(listed=(*GOOD, extra)).read(tmp_path)


def test_classes_with_one_image_are_counted(tmp_path: Path) -> None:
    extra = (("c1", 3, "c", "train"), ("d1", 4, "d", "test"), ("e1", 5, "e", "test"))
    with pytest.raises(DataError, match="class 'c' has one image in train, the first of 3 such classes; at least two are needed"):
        Listed(listed=(*GOOD, *extra)).read(tmp_path)


@pytest.mark.parametrize(
    ("scored", "message"),
    [
        ({"b1": "gallery", "b2": "gallery"}, "has images in gallery; besides train"),
        ({"b1": "query", "b2": "query"}, "has images in query; besides train"),
        ({"b1": "query", "c1": "gallery"}, "in query but not in gallery"),
    ],
)
def test_images_that_nothing_would_score_are_refused(tmp_path: Path, scored: dict[str, str], message: str) -> None:
    rows = tuple((path, ord(path[0]), path[0], role) for path, role in scored.items())
    with pytest.raises(DataError, match=message):
        Listed(listed=(*GOOD[:2], *rows)).read(tmp_path)


@pytest.mark.parametrize("rows", [GOOD[:2], GOOD[2:], (*GOOD[:2], ("b1", 2, "b", "query"), ("b2", 2, "b", "gallery"))])
def test_images_to_train_on_or_to_score_alone_pass(tmp_path: Path, rows: tuple[tuple[str, int, str, str], ...]) -> None:
    assert len(Listed(listed=rows).read(tmp_path).rows) == len(rows)


def test_no_images_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images"):
        Listed(listed=()).read(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        Listed(listed=()).read(tmp_path / "nowhere")
