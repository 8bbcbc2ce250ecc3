"""Ways in which a file is found damaged, and what a folder holds: for every test that damages files."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path


def flip(path: Path) -> None:
    """One bit of the byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Two thirds of it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def lengthen(path: Path) -> None:
    """Something behind its end, as two writers leave it."""
    path.write_bytes(path.read_bytes() + b'{"epoch": 0}\n')


def garble(path: Path) -> None:
    """The same length, other bytes."""
    path.write_bytes(os.urandom(path.stat().st_size))


def empty(path: Path) -> None:
    """Nothing in it, as after a crash of the machine."""
    path.write_bytes(b"")


def folder(path: Path) -> None:
    """A folder in its place."""
    path.unlink()
    path.mkdir()


def as_format(sealed: str, number: int) -> str:
    """A sealed file as another version of the program would write it: whole, of another format."""
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
    """Name below the folder -> bytes of every file; what was set aside and what is temporary begins with a dot and is left out."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
