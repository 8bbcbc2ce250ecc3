"""Small files that other processes read: written atomically; damaged ones are renamed and never overwritten."""

from pathlib import Path

from dml_core.errors import ConfigError
from dml_core.files import SET_ASIDE, check_regular, write_errors, writing


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under a unique temporary name, then rename it; a missing folder is created.

    Raises:
        OSError: it cannot be written; an existing file stays unchanged, and no temporary file remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_output(path: Path, start: bytes) -> None:
    """Check that a command may write a file that its user names: a new one, or one that begins with `start` as its output does.

    Raises:
        ConfigError: another file is there, or something that is not a regular file.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            found = file.read(len(start))
    except (FileNotFoundError, NotADirectoryError):
        return  # if it cannot be written either, the writer says so
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another file") from None
    if found not in (b"", start):
        raise ConfigError(f"{path}: already exists and was not written by this command; name another file")


def write_output(path: Path, text: str) -> None:
    """Write a file that a command's user names.

    Raises:
        StoreError: it cannot be written.
    """
    with write_errors(f"{path}:", "choose another file, or free space"):
        write_whole(path, text)


def files_set_aside(folder: Path) -> list[Path]:
    """Return the files in `folder` and below that `dml_core.files.set_aside` renamed, sorted."""
    return sorted(folder.rglob(f"*{SET_ASIDE}[0-9]*"))
