"""The files of a Debian package without root: apt downloads it, dpkg unpacks it into a folder of the person's own.

apt checks the package against the distribution's signature. Where the machine has no package lists (a slim container image) or they do
not name the package, they are fetched into a temporary folder first, which needs no root either.
"""

import subprocess
import tempfile
from pathlib import Path

from dml_core.errors import DataError

_LIMIT_SECONDS = 600
# An unreachable mirror is told in seconds. apt's own user, to which root would hand the download, cannot write in a person's folder.
_OPTIONS = ("-q", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1", "-o", "APT::Sandbox::User=root")


def unpack_package(package: str, target: Path) -> None:
    """Download a package of this machine's distribution and unpack it into `target`: all of it, or nothing is there.

    Args:
        package: its name.
        target: an absolute path where nothing is yet; its parent is a folder.

    Raises:
        DataError: there is no apt here, it does not know the package, or the download failed.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{package}.") as name:
        folder = Path(name)
        try:
            _download(package, folder)
        except DataError:
            _download(package, folder, *_own_lists(folder))
        _run(["dpkg-deb", "-x", str(next(folder.glob("*.deb"))), str(folder / "unpacked")], folder)
        (folder / "unpacked").rename(target)


def _download(package: str, folder: Path, *options: str) -> None:
    _run(["apt-get", *_OPTIONS, *options, "download", package], folder)


def _own_lists(folder: Path) -> list[str]:
    """apt's options to use lists of its own below `folder`, which have been fetched."""
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
        said = [line for line in ran.stderr.splitlines() if line.startswith("E:")] or [f"exit code {ran.returncode}"]
        raise DataError(f"{command[0]}: {said[0].removeprefix('E:').strip()}")
