"""Small files that other processes read: written whole or not at all, and renamed, never overwritten, where they are damaged."""

from pathlib import Path

from dml_core.files import SET_ASIDE, writing


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under a unique temporary name, then rename it; the folder is made where it is missing.

    Raises:
        OSError: it cannot be written; the file that was there is unchanged, and nothing is left beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def files_set_aside(folder: Path) -> list[Path]:
    """What `dml_core.files.set_aside` renamed in `folder` and below, sorted."""
    return sorted(folder.rglob(f"*{SET_ASIDE}[0-9]*"))
