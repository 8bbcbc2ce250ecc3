"""Archives: downloaded from a real HTTP server, resumed, checked, and unpacked inside their folder or not at all."""

import hashlib
import io
import random
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dml_core.data.drawing.layouts import write_cub200
from dml_core.data.readers.cub200 import Cub200
from dml_core.data.readers.shared.archives import Archive, check_md5, download, unpack
from dml_core.data.readers.synthetic import Synthetic, draw_pictures
from dml_core.data.registry import fetch
from dml_core.errors import DataError, StoreError
from tests.forked import forked_on_small_disk

CONTENT = bytes(range(256)) * 1000


class Handler(BaseHTTPRequestHandler):
    """Serve `content` and its ranges; stop after `breaks_after` bytes of the file if that is set."""

    content = CONTENT
    breaks_after: int | None = None
    ranges: list[str | None]

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start >= len(self.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(self.content)}")
            self.end_headers()
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        self.wfile.write(self.content[start : self.breaks_after])

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def handler() -> type[Handler]:
    return type("FreshHandler", (Handler,), {"ranges": []})


@pytest.fixture
def url(handler: type[Handler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/archive.tgz"
    server.shutdown()
    server.server_close()


def test_download_goes_on_where_it_stopped(url: str, handler: type[Handler], tmp_path: Path) -> None:
    handler.breaks_after = 100_000
    with pytest.raises(DataError, match="rerun the command to resume"):
        download(url, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    handler.breaks_after = None
    calls: list[tuple[int, int]] = []
    download(url, tmp_path / "file", progress=lambda *call: calls.append(call))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert handler.ranges == [None, "bytes=100000-"]
    assert calls[-1] == (len(CONTENT), len(CONTENT))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_download_that_was_killed_before_its_file_was_renamed_is_complete(url: str, tmp_path: Path) -> None:
    (tmp_path / ".file.partial").write_bytes(CONTENT)
    download(url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_part_that_is_longer_than_the_file_is_removed(url: str, tmp_path: Path) -> None:
    (tmp_path / ".file.partial").write_bytes(CONTENT + b"of another file")
    with pytest.raises(DataError, match="416"):
        download(url, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_unreachable_server(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="download failed after 0 bytes"):
        download("http://127.0.0.1:9/nothing", tmp_path / "file")


def test_checksum(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    check_md5(tmp_path / "file", "900150983cd24fb0d6963f7d28e17f72")
    with pytest.raises(DataError, match="md5 is 900150983cd24fb0d6963f7d28e17f72, published is 00"):
        check_md5(tmp_path / "file", "00")


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


MAKERS = {"tgz": tar, "zip": zipped}


@pytest.mark.parametrize("kind", MAKERS)
def test_unpacks_all_or_nothing(kind: str, tmp_path: Path) -> None:
    archive = MAKERS[kind](tmp_path / f"a.{kind}", {"top/one": b"1" * 5000, "top/two": bytes(range(256)) * 50})
    unpack(archive, tmp_path)
    assert (tmp_path / "top/one").read_bytes() == b"1" * 5000
    with pytest.raises(DataError, match="exists already"):
        unpack(archive, tmp_path)
    archive.write_bytes(archive.read_bytes()[:-40])
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="damaged or truncated"):
        unpack(archive, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def packed_by(kind: str, members: dict[str, bytes]) -> bytes:
    """Return a zip of a compression method's number, or a tar compressed by gz, bz2 or xz."""
    archive = io.BytesIO()
    if kind.startswith("zip"):
        with zipfile.ZipFile(archive, "w", int(kind[3:])) as zipped:
            for name, data in members.items():
                zipped.writestr(name, data)
    else:
        with tarfile.open(fileobj=archive, mode=f"w:{kind}") as tarred:  # type: ignore[call-overload]
            for name, data in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tarred.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


@pytest.mark.parametrize("kind", ["zip0", "zip8", "zip12", "zip14", "gz", "bz2", "xz"])
def test_a_damaged_archive_is_refused_or_has_lost_nothing(kind: str, tmp_path: Path) -> None:
    """A flipped bit in a compressed file is seen by its checksum, which may be after everything that tar reads.

    A zip's directory, which has no checksum, is left whole.
    """
    rng = random.Random(kind)
    members = {f"top/{number}": rng.randbytes(700) + bytes(300) for number in range(3)}
    whole, num_refused = packed_by(kind, members), 0
    end = whole.index(b"PK\x01\x02") if kind.startswith("zip") else len(whole)
    for number in range(100):
        damaged = bytearray(whole)
        if number % 4 == 0:
            del damaged[rng.randrange(len(whole)) :]
        else:
            damaged[rng.randrange(end)] ^= 1 << rng.randrange(8)
        (tmp_path / "archive").write_bytes(damaged)
        folder = tmp_path / str(number)
        refusal = ""
        try:
            unpack(tmp_path / "archive", folder)
        except DataError as error:
            refusal = str(error)
        if refusal:
            assert re.fullmatch(r"[^\n]*(damaged or truncated|cannot be unpacked here) \([^\n]*\)[^\n]*", refusal), "blames the archive"
            assert list(folder.iterdir()) == []
            num_refused += 1
        else:
            assert {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == members
    assert num_refused > 80


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(packed_by("zip0", {"naïve": b"1"}).replace("ï".encode(), b"\xff\xff"), id="a name that is not UTF-8"),
        pytest.param(packed_by("zip0", {"name": b"1"}).replace(b"name", b"\0ame"), id="an empty name in a zip"),
        pytest.param(packed_by("", {"é": b"1"}).replace(b"=\xc3\xa9", b"=a\0"), id="a zero byte in a name in a tar"),
    ],
)
def test_a_damaged_name_is_refused(damaged: bytes, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(damaged)
    with pytest.raises(DataError, match="damaged or truncated"):
        unpack(tmp_path / "archive", tmp_path / "in")
    assert list((tmp_path / "in").iterdir()) == []


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [(6, 1, "File .* is encrypted, password required for extraction"), (8, 99, "That compression method is not supported")],
)
def test_a_zip_that_python_does_not_unpack_says_so(place: int, value: int, reason: str, tmp_path: Path) -> None:
    data = bytearray(packed_by("zip0", {"one": b"1"}))
    central = data.index(b"PK\x01\x02")
    data[place], data[central + place + 2] = value, value
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(
        DataError, match=rf"^{re.escape(str(tmp_path / 'a.zip'))}: cannot be unpacked here \({reason}\); unpack it with another program$"
    ):
        unpack(tmp_path / "a.zip", tmp_path / "in")
    assert list((tmp_path / "in").iterdir()) == []


def fill_the_disk(folder: Path, kinds: list[str]) -> None:
    """Unpack each kind of archive into an own folder."""
    for kind in kinds:
        with pytest.raises(StoreError, match="cannot be written"):
            unpack(folder / kind, folder / f"in-{kind}")
        assert list((folder / f"in-{kind}").iterdir()) == [], kind


def test_a_full_disk_is_not_called_damage(tmp_path: Path) -> None:
    kinds = ["zip8", "zip12", "gz", "bz2"]
    for kind in kinds:
        (tmp_path / kind).write_bytes(packed_by(kind, {"one": b"1" * 500_000}))
    assert forked_on_small_disk(100_000, fill_the_disk, tmp_path, kinds) == 0


def test_what_cannot_be_read_is_not_called_damage(tmp_path: Path) -> None:
    (tmp_path / "a.tgz").mkdir()  # root may read every file, but no folder is one
    with pytest.raises(DataError, match=r"a\.tgz: cannot be read \(Is a directory\)"):
        unpack(tmp_path / "a.tgz", tmp_path / "in")


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/tmp/outside"])
def test_nothing_is_written_outside(kind: str, name: str, tmp_path: Path) -> None:
    archive = MAKERS[kind](tmp_path / f"a.{kind}", {"fine": b"1", name: b"2"})
    with pytest.raises(DataError, match="refused"):
        unpack(archive, tmp_path / "in")
    assert list((tmp_path / "in").iterdir()) == []
    assert not list(tmp_path.rglob("outside"))


def test_links_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match="'link' is a link"):
        unpack(tmp_path / "a.tgz", tmp_path / "in")
    assert list((tmp_path / "in").iterdir()) == []


def test_fetch_downloads_checks_and_unpacks(url: str, handler: type[Handler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Synthetic(num_classes=4, images_per_class=2, image_size=16)
    write_cub200(tmp_path / "made", draw_pictures(config), 4)
    paths = [path for path in (tmp_path / "made").rglob("*") if path.is_file()]
    files = {path.relative_to(tmp_path / "made").as_posix(): path.read_bytes() for path in paths}
    handler.content = tar(tmp_path / "made.tgz", files).read_bytes()
    right = hashlib.md5(handler.content).hexdigest()
    for md5 in ("0" * 32, right):
        monkeypatch.setattr(Cub200, "archives", (Archive("CUB.tgz", "CUB_200_2011", md5, url),))
        if md5 != right:
            with pytest.raises(DataError, match="published is 0000"):
                fetch("cub200", {}, tmp_path / "raw")
            (tmp_path / "raw/CUB.tgz").unlink()
            assert not (tmp_path / "raw/CUB_200_2011").exists()
    fetch("cub200", {}, tmp_path / "raw")
    fetch("cub200", {}, tmp_path / "raw")
    assert len(handler.ranges) == 2, "what is there is not fetched again"
    assert len(Cub200(published_counts=False).read(tmp_path / "raw").rows) == 8


def test_a_link_that_died_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cub200, "archives", (Archive("CUB.tgz", "CUB_200_2011", None, "http://127.0.0.1:9/CUB.tgz"),))
    with pytest.raises(DataError, match=r"download failed .*; or by hand: download CUB_200_2011.tgz"):
        fetch("cub200", {}, tmp_path)


@pytest.mark.parametrize("name", ["cars196", "sop", "inshop"])
def test_dead_links_say_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no raw files; (the official links are dead|get )"):
        fetch(name, {}, tmp_path)
