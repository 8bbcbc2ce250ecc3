"""Publishers' files: download where a link works, verification by the published checksum, safe unpacking."""

import hashlib
import lzma
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, cast

from dml_core.errors import DataError
from dml_core.files import write_errors

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
# Raised by Python for a damaged archive: of its format, its compression, and names that cannot be (with a zero byte, not UTF-8, empty).
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, IndexError)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Archive:
    """One file of a published dataset.

    Attributes:
        file_name: the publisher's file name, in the raw folder.
        unpacked: a path in the raw folder that exists after unpacking (the file itself if it is no archive).
        md5: published checksum, or None.
        url: direct download link, or None.
        num_bytes: published size, for `dml plan`, or None.
    """

    file_name: str
    unpacked: str
    md5: str | None = None
    url: str | None = None
    num_bytes: int | None = None


def download(url: str, path: Path, progress: Progress | None = None) -> None:
    """Download a file; an interrupted download resumes.

    Args:
        progress: called with (bytes done, total bytes; 0 if the server does not report it).

    Raises:
        DataError: the server cannot be reached or the file is incomplete; the part received is kept unless it is longer than the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    done = partial.stat().st_size if partial.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            done = done if response.status == HTTPStatus.PARTIAL_CONTENT else 0
            total = done + int(response.headers.get("Content-Length", 0))
            with partial.open("ab" if done else "wb") as file:
                while chunk := response.read(_CHUNK_BYTES):
                    file.write(chunk)
                    done += len(chunk)
                    if progress:
                        progress(done, total)
    except (OSError, HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            if error.headers.get("Content-Range") == f"bytes */{done}":
                partial.replace(path)  # complete: the program was killed before it renamed the file
                return
            partial.unlink()  # the remote file is shorter than the part received, so it is a different file
        raise DataError(f"{url}: download failed after {done} bytes ({error}); rerun the command to resume") from None
    if done < total:
        raise DataError(f"{url}: ended after {done} of {total} bytes; rerun the command to resume")
    partial.replace(path)


def check_md5(path: Path, md5: str) -> None:
    """Compare a file with its published checksum.

    Raises:
        DataError: the file is damaged or a different one.
    """
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "md5").hexdigest()
    if actual != md5:
        raise DataError(f"{path}: md5 is {actual}, published is {md5}; remove the file and fetch it again")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar or zip file into `folder`, completely or not at all, without overwriting anything.

    Raises:
        DataError: the archive is damaged or cannot be read, has paths outside the folder, or contains a name that exists in the folder.
        StoreError: the folder cannot be written.
    """
    partial = folder / f".{archive.name}.unpacking"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _extract(archive, partial)
        for path in partial.iterdir():
            if (folder / path.name).exists():
                raise DataError(f"{folder / path.name}: exists already; remove it to unpack {archive.name} again")
        for path in partial.iterdir():
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _extract(archive: Path, folder: Path) -> None:
    try:
        for name, content in _members(archive):
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise DataError(f"{archive}: refused, '{name}' would be written outside its folder")
            with content:
                _write(folder / name, content)
    except RuntimeError as error:  # of a zip: encrypted, or compressed in a way that Python does not know
        raise DataError(f"{archive}: cannot be unpacked here ({error}); unpack it with another program") from None
    except DAMAGE as error:
        if isinstance(error, OSError) and error.strerror:  # of the system; those of damage have no number and text
            raise DataError(f"{archive}: cannot be read ({error.strerror}); check its permissions and disk") from None
        raise DataError(f"{archive}: damaged or truncated ({error}); fetch it again") from None


def _write(path: Path, content: IO[bytes]) -> None:
    with write_errors(f"{path.parent}:", "free space or choose another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            while chunk := _read(content):
                file.write(chunk)


def _read(content: IO[bytes]) -> bytes:
    try:
        return content.read(_CHUNK_BYTES)
    except OSError as error:  # damage in gzip and bzip2
        raise EOFError(str(error)) from None


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield names and contents of the regular files; Python's extraction filters would suffice but exist only since 3.11.4."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            yield from ((entry.filename, zipped.open(entry)) for entry in zipped.infolist() if not entry.is_dir())
        return
    with tarfile.open(archive) as tarred:
        for member in tarred:
            content = tarred.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content
            elif not member.isdir():
                raise DataError(f"{archive}: refused, '{member.name}' is a link or device, which a dataset does not need")
        while _read(cast(IO[bytes], tarred.fileobj)):  # a compressed file's checksum is at its end, after what tar reads
            pass
