"""The state of files as the file system tells it, to find that none has changed without reading them. Compiled Python does not count."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path


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
    for path in paths:
        yield path
        if path.is_dir():
            yield from (inner for inner in sorted(path.rglob("*")) if "__pycache__" not in inner.parts)
