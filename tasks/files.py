"""Small files that other processes read: written whole or not at all, and renamed, never overwritten, where they are damaged."""

import os
from itertools import count
from pathlib import Path

from dml_core.files import writing

SET_ASIDE = ".damaged-"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under a unique temporary name, then rename it; the folder is made where it is missing.

    Raises:
        OSError: it cannot be written; the file that was there is unchanged, and nothing is left beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def set_aside(path: Path) -> Path:
    """Rename a file, link or folder to `<name>.damaged-<N>`, N counting from 1, and return the new path; earlier ones stay.

    Two processes that may do so at once hold a lock (`tasks.locks`).

    Raises:
        OSError: it cannot be renamed.
    """
    aside = next(aside for number in count(1) if not os.path.lexists(aside := path.with_name(f"{path.name}{SET_ASIDE}{number}")))
    return path.rename(aside)


def files_set_aside(folder: Path) -> list[Path]:
    """What `set_aside` renamed in `folder` and below, sorted."""
    return sorted(folder.rglob(f"*{SET_ASIDE}[0-9]*"))
