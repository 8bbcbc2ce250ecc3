"""Ways to damage a file, and the contents of a folder, for every test that damages files."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path


def flip(path: Path) -> None:
    """Flip one bit of the middle byte."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Cut the file to two thirds."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def lengthen(path: Path) -> None:
    """Append a line, as two concurrent writers do."""
    path.write_bytes(path.read_bytes() + b'{"epoch": 0}\n')


def garble(path: Path) -> None:
    """Replace all bytes by random ones."""
    path.write_bytes(os.urandom(path.stat().st_size))


def empty(path: Path) -> None:
    """Remove the content, as a crash of the machine does."""
    path.write_bytes(b"")


def folder(path: Path) -> None:
    """Replace the file by a folder."""
    path.unlink()
    path.mkdir()


def as_format(sealed: str, number: int) -> str:
    """Return an intact sealed file in another format, as another version of the program would write it."""
    record = json.loads(sealed)["record"]
    return json.dumps({"format": number, "sha256": hashlib.sha256(f"{number} {record}".encode()).hexdigest(), "record": record})


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flip": flip,
    "cut": cut,
    "lengthen": lengthen,
    "garble": garble,
    "empty": empty,
    "remove": Path.unlink,
}


def contents(folder: Path) -> dict[str, bytes]:
    """Return path in the folder -> bytes of every file, without set-aside and temporary files, whose names begin with a dot."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
