"""Small files that other processes read: written atomically; damaged ones are renamed and never overwritten."""

from pathlib import Path

from dml_core.files import SET_ASIDE, writing


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under a unique temporary name, then rename it; a missing folder is created.

    Raises:
        OSError: it cannot be written; an existing file stays unchanged, and no temporary file remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def files_set_aside(folder: Path) -> list[Path]:
    """Return the files in `folder` and below that `dml_core.files.set_aside` renamed, sorted."""
    return sorted(folder.rglob(f"*{SET_ASIDE}[0-9]*"))
