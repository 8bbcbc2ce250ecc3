"""Raw folders that the program writes itself, once for each generator and options, and never over files of the user."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dml_core.errors import DataError
from dml_core.files import file_sha256

STAMP_FILE = "generator.txt"
_BEFORE_NAME = 66  # characters: a SHA-256 and two spaces


def generate_once(raw: Path, stamp: str, generate: Callable[[Path], None]) -> None:
    """Replace `raw` by a generated folder, completely or not at all, unless it holds the result of the same stamp.

    Args:
        raw: the raw folder.
        stamp: whole lines that identify options and generator. The stamp file has them and the SHA-256 of every generated file.
        generate: writes all files into a folder, which it may have to create.

    Raises:
        DataError: `raw` holds files that the generator did not write.
    """
    raw = Path(os.path.realpath(raw))  # keep a link and replace its target
    stamped = raw / STAMP_FILE
    written = stamped.read_text(encoding="utf-8", errors="replace") if stamped.is_file() else ""
    if written.startswith(stamp) and written != stamp:  # the stamp file of an earlier version may name no file: generated again
        return
    if raw.is_dir() and any(raw.iterdir()) and not stamped.is_file():
        raise DataError(f"{raw}: holds files that the generator did not write; move them or choose another folder")
    partial = raw.parent / f".{raw.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        generate(partial)
        new = _files(partial)
        # The stamp file of an earlier version does not name the files; most are replaced by files of the same name.
        foreign = _files(raw) - new - {line[_BEFORE_NAME:] for line in written.splitlines()} - {STAMP_FILE}
        if foreign:
            raise DataError(
                f"{raw}: the generator did not write, or no longer does, {len(foreign)} of its files, the first is {min(foreign)}; "
                "remove the folder if none of them is yours, else move yours away"
            )
        hashes = "".join(f"{file_sha256(partial / name)}  {name}\n" for name in sorted(new))
        (partial / STAMP_FILE).write_text(stamp + hashes, encoding="utf-8")
        shutil.rmtree(raw, ignore_errors=True)
        partial.rename(raw)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _files(folder: Path) -> set[str]:
    """Return the paths of all files and links below a folder, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def recorded_sha256(path: Path) -> str | None:
    """Return the SHA-256 that the stamp file records of a file in the same folder; None in folders of earlier versions.

    Raises:
        OSError, UnicodeDecodeError: the stamp file cannot be read.
    """
    stamp = path.with_name(STAMP_FILE)
    lines = stamp.read_text(encoding="utf-8").splitlines() if stamp.exists() else []
    return next((line.split()[0] for line in lines if line[_BEFORE_NAME:] == path.name), None)
