"""Raw folders that the program writes itself, once for each generator and options, and never over files of the user."""

import shutil
from collections.abc import Callable
from pathlib import Path

from dml_core.errors import DataError

STAMP_FILE = "generator.txt"


def generate_once(raw: Path, stamp: str, generate: Callable[[Path], None]) -> None:
    """Replace `raw` by a generated folder, completely or not at all, unless it holds the result of the same stamp.

    Args:
        raw: the raw folder.
        stamp: text that identifies options and generator.
        generate: writes all files into a folder, which it may have to create.

    Raises:
        DataError: `raw` holds files that the generator did not write.
    """
    if has_stamp(raw, stamp):
        return
    if raw.is_dir() and any(raw.iterdir()) and not (raw / STAMP_FILE).is_file():
        raise DataError(f"{raw}: holds files that the generator did not write; move them or choose another folder")
    partial = raw.parent / f".{raw.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        generate(partial)
        (partial / STAMP_FILE).write_text(stamp, encoding="utf-8")
        shutil.rmtree(raw, ignore_errors=True)
        partial.rename(raw)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def has_stamp(raw: Path, stamp: str) -> bool:
    """Return whether `raw` is the result of that stamp."""
    path = raw / STAMP_FILE
    return path.is_file() and path.read_text(encoding="utf-8") == stamp
