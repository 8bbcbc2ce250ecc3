"""`dml data` from the user's side: each verb, and bad input, which gives a one-line error, exit code 2 and no written file.

The command runs in this process (`flows.cli.main`, like the installed script); tests/flows/test_cli.py starts it as a process.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
import yaml
from PIL import Image

from dml_core.config import read_yaml
from flows.cli import main
from tests import forked
from tests.conftest import ROOT

DRAWN = {"num_classes": 6, "images_per_class": 3, "image_size": 24}
CUB = {"reader": "cub200", "raw": "data/raw/d", "options": {"published_counts": False}}


class Project:
    """A folder with a `params.yaml` whose dataset `d` is set by the test."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.raw, self.packed = root, root / "data/raw/d", root / "data/packed/d"
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.dataset(reader="synthetic", raw="data/raw/d", options=DRAWN)

    def dataset(self, **block: object) -> None:
        params = read_yaml(ROOT / "params.yaml")
        (self.root / "params.yaml").write_text(yaml.safe_dump({**params, "datasets": {**params["datasets"], "d": block}}))

    def dml(self, *words: str, code: int = 0) -> str:
        """Run `dml data` on dataset d; return its standard output, or its one-line error."""
        command, *rest = words
        self._monkeypatch.setattr(sys, "argv", ["dml", "data", command, *(["d"] if command != "list" else []), *rest])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = self._capsys.readouterr()
        assert ended.value.code == code, printed.err
        if code == 0:
            return printed.out
        assert re.fullmatch(r"error: .+\n", printed.err), printed.err
        return printed.err

    def files(self) -> dict[str, bytes]:
        """Return the bytes of every file of the project's data, including hidden files."""
        paths = [path for path in (self.root / "data").rglob("*") if path.is_file()]
        return {os.fsdecode(os.fsencode(path.relative_to(self.root))): path.read_bytes() for path in paths}

    def refused(self, command: str, message: str) -> None:
        """Assert that the command is rejected with a one-line error that matches `message`, and changes no file."""
        before = self.files()
        assert re.search(message, self.dml(command, code=2))
        assert self.files() == before


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    environment = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    yield Project(tmp_path, capsys, monkeypatch)
    os.environ.clear()
    os.environ.update(environment)


# ---------------------------------------------------------------- the verbs


def test_from_nothing_to_a_contact_sheet(project: Project) -> None:
    listed = project.dml("list")
    assert "d: reader synthetic, raw files in data/raw/d: not prepared; dml data fetch d\n" in listed
    assert "readers: cars196, cub200, " in listed
    assert project.dml("fetch") == f"d: raw files are in {project.raw}\n"
    assert "9 images of 3 classes, 3 per class" in re.sub(r"\s*│\s*\n?\s*│?\s*", " ", project.dml("check"))
    assert re.fullmatch(r"d: 9 train, 9 test, digest [0-9a-f]{16}\n", project.dml("prepare"))
    assert "d: reader synthetic, raw files in data/raw/d: prepared, 9 train, 9 test, digest" in project.dml("list")
    assert project.dml("show", "--role", "test", "--classes", "2", "--samples", "3") == "contact_sheet.png\n"
    with Image.open(project.root / "contact_sheet.png") as sheet:
        assert sheet.size == (480, 204)


def test_a_clone_without_raw_files_is_told_what_dvc_can_pull(project: Project) -> None:
    project.dataset(reader="folder", raw="data/raw/d")
    (project.root / "dvc.lock").write_text("stages: {prepare@d: {outs: [{md5: 1a.dir}]}}")
    assert (
        "d: reader folder, raw files in data/raw/d: not prepared; dml data fetch d; or, if it was pushed, run: dvc pull prepare@d\n"
        in project.dml("list")
    )
    project.refused("fetch", "no raw files; put one directory of images per class there; or, if it was pushed, run: dvc pull prepare@d$")


def test_a_raw_folder_with_faults_is_a_table_and_exit_code_2(project: Project) -> None:
    project.dml("fetch")
    images = sorted(project.raw.rglob("*.jpg"))
    images[0].write_bytes(b"")
    shutil.copy(images[4], images[17])
    project.refused("check", "2 kinds of violation, see the table; fix the raw files in data/raw/d")
    project.dataset(reader="cub200", raw="data/raw/d")
    project.refused("check", "3 kinds of violation")


def test_a_check_prints_five_files_of_a_kind_and_writes_all_of_them(project: Project) -> None:
    project.dml("fetch")
    images = sorted(project.raw.rglob("*.jpg"))
    whole = {path: path.read_bytes() for path in images[:7]}
    for path in whole:
        path.write_bytes(b"")
    project.refused("check", "1 kind of violation, see the table")
    rows = (project.root / "state/checks/d.csv").read_text().splitlines()
    unreadable = [row for row in rows if row.startswith("unreadable,")]
    assert [row.partition(" ")[0].rpartition("/")[2] for row in unreadable] == [path.name for path in images[:7]]
    for path, data in whole.items():
        path.write_bytes(data)
    project.dml("check")
    assert "unreadable" not in (project.root / "state/checks/d.csv").read_text(), "what was repaired is not listed any more"


def test_show_before_prepare_and_where_it_cannot_write(project: Project) -> None:
    assert "no prepared dataset; run `dml data prepare d`" in project.dml("show", code=2)
    assert "dml data prepare d\n" not in project.dml("list")
    project.dml("fetch")
    assert "dml data prepare d\n" in project.dml("list")
    project.dml("prepare")
    assert "no role 'query' (it has train, test)" in project.dml("show", "--role", "query", code=2)
    assert "'val' is not one of 'train', 'test', 'query', 'gallery'" in project.dml("show", "--role", "val", code=2)
    assert "cannot be written (No such file or directory)" in project.dml("show", "--output", "nowhere/sheet.png", code=2)


def test_a_damaged_dataset_is_listed_as_damaged_and_prepared_again(project: Project) -> None:
    project.dml("fetch")
    prepared = project.dml("prepare")
    info = project.packed / "dataset.json"
    info.write_bytes(info.read_bytes()[:-9])
    assert "raw files in data/raw/d: damaged; run `dml data prepare` again\n" in project.dml("list")
    info.write_text('{"format": 99}')
    assert "raw files in data/raw/d: written by a newer version (format 99, " in project.dml("list")
    assert project.dml("prepare") == prepared
    assert ": prepared, 9 train" in project.dml("list")


@pytest.mark.parametrize("name", ["images.arrow", "manifest.parquet"])
def test_show_names_the_packed_file_that_is_missing_or_damaged(project: Project, name: str) -> None:
    project.dml("fetch")
    project.dml("prepare")
    path = project.packed / name
    path.write_bytes(path.read_bytes()[:-50])
    assert f"d/{name}: damaged (SHA-256 differs); run `dml data prepare` again" in project.dml("show", code=2)
    path.unlink()
    assert f"d/{name}: cannot be read (No such file or directory); run `dml data prepare` again" in project.dml("show", code=2)
    assert not (project.root / "contact_sheet.png").exists()


def test_raw_files_come_from_an_s3_mirror(project: Project, s3_bucket: str) -> None:
    project.dml("fetch")
    archive = packed_tree(project.raw / "CUB_200_2011")
    shutil.rmtree(project.raw)
    boto3.client("s3").put_object(Bucket=s3_bucket, Key="cub/CUB_200_2011.tgz", Body=archive)
    project.dataset(**CUB, mirror=f"s3://{s3_bucket}/cub")
    project.dml("fetch")
    assert (project.raw / "CUB_200_2011.tgz").read_bytes() == archive
    assert "9 train, 9 test" in project.dml("prepare")
    project.dataset(**CUB | {"raw": "data/raw/e"}, mirror="s3://nobody/cub")
    project.refused("fetch", "s3://nobody/cub: list_objects_v2 failed")


# ---------------------------------------------------------------- bad input


def packed_tree(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, folder.name)
    return buffer.getvalue()


def image(raw: Path, number: int = 4) -> Path:
    return sorted(raw.rglob("*.jpg"))[number]


IMAGE_5 = r"Species_2_0002\.jpg"
BAD_CUB: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated JPEG": (
        lambda raw: image(raw).write_bytes(image(raw).read_bytes()[:-30]),
        f"{IMAGE_5}: cannot be decoded .damaged",
    ),
    "zero-byte file": (lambda raw: image(raw).write_bytes(b""), f"{IMAGE_5}: the file is empty"),
    "not an image": (lambda raw: image(raw).write_bytes(b"<html>moved</html>"), f"{IMAGE_5}: cannot be decoded .not an image"),
    "missing image": (lambda raw: image(raw).unlink(), f"{IMAGE_5}: listed, but there is no such file; restore it or correct the list"),
    "name that is not UTF-8": (
        lambda raw: (raw / "CUB_200_2011/images.txt").write_bytes(b"1 001.Species_1/\xff.jpg\n"),
        r"images\.txt: not UTF-8 text",
    ),
}


@pytest.mark.parametrize("fault", BAD_CUB)
def test_bad_raw_files(project: Project, fault: str) -> None:
    """The dataset is packed already; its packed files do not change. tests/data has more faults."""
    project.dml("fetch")
    project.dataset(**CUB)
    project.dml("prepare")
    damage, message = BAD_CUB[fault]
    damage(project.raw)
    project.refused("prepare", message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"path,label\n../x.jpg,a\n", "leads out of the folder"),
        (b"path,\xff\n", "not readable as a table"),
        (b"path,label\n\xff.jpg,a\n", "not readable as a table"),
    ],
)
def test_bad_lists(project: Project, content: bytes, message: str) -> None:
    project.dataset(reader="manifest", raw="data/raw/d")
    project.raw.mkdir(parents=True)
    (project.raw / "manifest.csv").write_bytes(content)
    project.refused("prepare", message)


def test_a_file_whose_name_is_not_utf8(project: Project) -> None:
    project.dataset(reader="folder", raw="data/raw/d")
    for name in (b"1.png", b"\xff.png"):
        path = project.raw / "a" / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    project.refused("prepare", r"the name of \\udcff.png is not UTF-8; rename the file")


def test_bad_archives(project: Project) -> None:
    project.dml("fetch")
    archive = packed_tree(project.raw / "CUB_200_2011")
    shutil.rmtree(project.raw)
    path = project.raw / "CUB_200_2011.tgz"
    path.parent.mkdir()
    path.write_bytes(archive[: len(archive) // 2])
    project.dataset(reader="cub200", raw="data/raw/d")
    project.refused("fetch", r"CUB_200_2011\.tgz: md5 is [0-9a-f]{32}, published is 97eceeb196236b17998738112f37df78")
    project.dataset(**CUB)
    project.refused("fetch", r"CUB_200_2011\.tgz: damaged or truncated .*fetch it again")
    with tarfile.open(path, "w:gz") as written:
        written.addfile(tarfile.TarInfo("CUB_200_2011/../../outside"), io.BytesIO())
    project.refused("fetch", r"refused, 'CUB_200_2011/\.\./\.\./outside' would be written outside its folder")


TARGETS = {"fetch": "data/raw", "prepare": "data/packed"}


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[bool]:
    """Mount a tmpfs over a folder; yield False, without a mount, if this machine does not allow it."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("command", TARGETS)
def test_a_full_disk(project: Project, command: str) -> None:
    """On a small tmpfs or, if mounts are not allowed, with the kernel's limit on the size of files that another process writes."""
    if command == "prepare":
        project.dml("fetch")
    with mounted(project.root / TARGETS[command], "size=8k") as is_mounted:
        if is_mounted:
            project.refused(command, "cannot be written .No space left on device")
            return
        before = project.files()
        shown = forked.dml(["data", command, "d"], project.root, max_bytes=500)
        assert re.fullmatch(r"error: .+ cannot be written .File too large.+\n", shown.stderr), shown.stderr
        assert (shown.returncode, project.files()) == (2, before)


@pytest.mark.parametrize("command", TARGETS)
def test_a_target_that_cannot_be_written(project: Project, command: str) -> None:
    """On a read-only mount or, if mounts are not allowed, with a file instead of the folder."""
    if command == "prepare":
        project.dml("fetch")
    target = project.root / TARGETS[command]
    with mounted(target, "ro") as is_mounted:
        if not is_mounted:
            target.rmdir()
            target.write_text("a file")
        project.refused(command, "cannot be written .(Read-only file system|Not a directory|File exists)")
