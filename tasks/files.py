"""Small files that other processes read: whole or not there, whoever else writes the same one."""

from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, text: str) -> None:
    """Write a text beside its place under a name of its own, then rename it; the folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
