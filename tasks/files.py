"""Small files that other processes read: written atomically; damaged ones are renamed and never overwritten."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dml_core.errors import StoreError
from dml_core.files import SET_ASIDE, writing


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under a unique temporary name, then rename it; a missing folder is created.

    Raises:
        OSError: it cannot be written; an existing file stays unchanged, and no temporary file remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing_scores(folder: Path) -> Iterator[None]:
    """Report a run's folder of scores that cannot be written as a StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{folder}: scores cannot be written ({error.strerror or error}); free or change the store") from None


def files_set_aside(folder: Path) -> list[Path]:
    """Return the files in `folder` and below that `dml_core.files.set_aside` renamed, sorted."""
    return sorted(folder.rglob(f"*{SET_ASIDE}[0-9]*"))
