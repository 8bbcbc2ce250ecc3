"""Small files that other processes read, written atomically; and the state of files as the file system tells it."""

import hashlib
from collections.abc import Iterable, Iterator
from mimetypes import MimeTypes
from pathlib import Path

from dml_core.errors import ConfigError
from dml_core.files import SET_ASIDE, check_regular, write_errors, writing


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under a unique temporary name, then rename it; a missing folder is created.

    Raises:
        OSError: it cannot be written; an existing file stays unchanged, and no temporary file remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_output(path: Path, kind: str, start: bytes) -> None:
    """Check that a command may write a file that its user names: a new one, or one that begins with `start` as its output does.

    Raises:
        ConfigError: the name's suffix is of another kind (as `image/png`) than the output, or another file is there, or something that is
            not a regular file.
    """
    if (named := MimeTypes().guess_type(path.name)) not in ((None, None), (kind, None)):
        raise ConfigError(f"{path}: named as {named[1] or named[0]}, and the file would be {kind}; choose another name")
    try:
        check_regular(path)
        with path.open("rb") as file:
            found = file.read(len(start))
    except (FileNotFoundError, NotADirectoryError):
        return  # if it cannot be written either, the writer says so
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another file") from None
    if found not in (b"", start):
        raise ConfigError(f"{path}: already exists and was not written by this command; name another file")


def write_output(path: Path, text: str) -> None:
    """Write a file that a command's user names.

    Raises:
        StoreError: it cannot be written.
    """
    with write_errors(f"{path}:", "choose another file, or free space"):
        write_whole(path, text)


def files_set_aside(folder: Path) -> list[Path]:
    """Return the files in `folder` and below that `dml_core.files.set_aside` renamed, sorted."""
    return sorted(folder.rglob(f"*{SET_ASIDE}[0-9]*"))


def hash_of_states(paths: Iterable[Path], text: str = "") -> str | None:
    """Return a hash of a text and of the path, size, time of change and inode of each file at or below `paths`; None if one is missing."""
    digest = hashlib.sha256(text.encode())
    try:
        for file in _inside(paths):
            if not file.is_dir():
                state = file.stat()
                digest.update(f"{file} {state.st_size} {state.st_mtime_ns} {state.st_ino}\n".encode())
    except OSError:
        return None
    return digest.hexdigest()


def last_change(paths: Iterable[Path]) -> int:
    """Return when a file or folder at or below `paths` last changed in content, name or owner, in nanoseconds.

    Raises:
        OSError: one is missing.
    """
    return max(path.stat().st_ctime_ns for path in _inside(paths))


def _inside(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield paths and all below them, without compiled Python."""
    for path in paths:
        yield path
        if path.is_dir():
            yield from (inner for inner in sorted(path.rglob("*")) if "__pycache__" not in inner.parts)
