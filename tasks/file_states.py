"""The state of files as the file system tells it, to find that none has changed without reading them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def hash_of_states(paths: Iterable[Path], text: str = "") -> str | None:
    """Return a hash of a text and of the path, size, time of change and inode of each file at or below `paths`; None if one is missing."""
    digest = hashlib.sha256(text.encode())
    for path in paths:
        try:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if not file.is_dir():
                    state = file.stat()
                    digest.update(f"{file} {state.st_size} {state.st_mtime_ns} {state.st_ino}\n".encode())
        except OSError:
            return None
    return digest.hexdigest()
