"""Raw folders that the program writes itself, once for each generator and options, and never over files of the user."""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from dml_core.errors import DataError
from dml_core.files import file_sha256

STAMP_FILE = "generator.txt"


def generate_once(raw: Path, stamp: str, generate: Callable[[Path], None], hashed: Iterable[str] = ()) -> None:
    """Replace `raw` by a generated folder, completely or not at all, unless it holds the result of the same stamp.

    Args:
        raw: the raw folder.
        stamp: whole lines that identify options and generator.
        generate: writes all files into a folder, which it may have to create.
        hashed: names of files whose SHA-256 the stamp file records.

    Raises:
        DataError: `raw` holds files that the generator did not write.
    """
    raw = Path(os.path.realpath(raw))  # keep a link and replace its target
    stamped = raw / STAMP_FILE
    if stamped.is_file() and stamped.read_text(encoding="utf-8").startswith(stamp):
        return
    if raw.is_dir() and any(raw.iterdir()) and not stamped.is_file():
        raise DataError(f"{raw}: holds files that the generator did not write; move them or choose another folder")
    partial = raw.parent / f".{raw.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        generate(partial)
        hashes = "".join(f"{file_sha256(partial / name)}  {name}\n" for name in hashed)
        (partial / STAMP_FILE).write_text(stamp + hashes, encoding="utf-8")
        shutil.rmtree(raw, ignore_errors=True)
        partial.rename(raw)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def recorded_sha256(path: Path) -> str | None:
    """Return the SHA-256 that the stamp file records of a file in the same folder; None in folders of earlier versions.

    Raises:
        OSError, UnicodeDecodeError: the stamp file cannot be read.
    """
    stamp = path.with_name(STAMP_FILE)
    lines = stamp.read_text(encoding="utf-8").splitlines() if stamp.exists() else []
    return next((line.split()[0] for line in lines if line.endswith(f"  {path.name}")), None)
