"""Location of a published dataset in a raw folder: copies may be nested one folder more or less than the publisher's."""

from collections.abc import Iterable
from pathlib import Path

from dml_core.errors import DataError

MAX_LEVELS = 2
_MAX_NAMES = 5


def find_folder(raw: Path, landmarks: Iterable[str]) -> Path | None:
    """Return the folder to which a dataset's files are relative: `raw` or the nearest one below it, at most two levels.

    Args:
        raw: folder in which the user put the dataset.
        landmarks: paths relative to the wanted folder, any of which identifies it.

    Returns:
        None if no folder has any of them.

    Raises:
        DataError: two folders at the same level have them; the user must choose.
    """
    wanted = tuple(landmarks)
    level = [raw]
    for _ in range(MAX_LEVELS + 1):
        copies = [folder for folder in level if any((folder / landmark).exists() for landmark in wanted)]
        if len(copies) > 1:
            raise DataError(f"{raw}: two copies of the dataset, {copies[0]} and {copies[1]}; keep one, or name one of them as raw")
        if copies:
            return copies[0]
        level = [child for folder in level for child in _folders(folder)]
    return None


def find_place(folder: Path, alternatives: Iterable[str]) -> Path | None:
    """Return the first of some paths in a folder that exists, or None."""
    return next((folder / path for path in alternatives if (folder / path).exists()), None)


def names_there(folder: Path) -> str:
    """Return the first few names in a folder, as text."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))
    return ", ".join(names[:_MAX_NAMES] + ["..."] * (len(names) > _MAX_NAMES)) or "nothing"


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith((".", "__MACOSX")))
