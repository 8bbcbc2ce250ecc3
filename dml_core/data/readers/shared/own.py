"""Common parts of the readers of the user's own images: file names, the default split by class, and the choice of reader for a path."""

from pathlib import Path, PurePath

from dml_core.data.store.rows import Role
from dml_core.errors import DataError

LIST_SUFFIXES = (".csv", ".parquet")
IMAGE_SUFFIXES = (".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def is_image_name(path: PurePath) -> bool:
    """Return whether the name has the suffix of an image file."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def is_list_name(path: PurePath) -> bool:
    """Return whether the name has the suffix of a list of images."""
    return path.suffix.lower() in LIST_SUFFIXES


def split_by_class(names: set[str]) -> dict[str, Role]:
    """Return the role of each class: in order of their names, the first half is for training, the rest for test, as in CUB."""
    ordered = sorted(names)
    return {name: "train" if index < len(ordered) // 2 else "test" for index, name in enumerate(ordered)}


def guess_reader(path: Path, reader: str | None) -> tuple[str, Path, dict[str, str]]:
    """Return the reader for a path, its raw folder, and the reader's options.

    Args:
        path: a folder, or a list of images (CSV or Parquet).
        reader: "folder" or "manifest", if the user chose one; None prefers a list if there is one.

    Raises:
        DataError: nothing at `path`, no list although required, or several lists.
    """
    if path.is_file() and is_list_name(path) and reader != "folder":
        return "manifest", path.parent, {} if path.name == "manifest.csv" else {"file": path.name}
    if not path.is_dir():
        problem = "neither a folder nor a list (.csv, .parquet)" if path.exists() else "no such folder or file"
        raise DataError(f"{path}: {problem}; name the folder that has a folder of images per class, or a list of images")
    lists = [path / f"manifest{suffix}" for suffix in LIST_SUFFIXES if (path / f"manifest{suffix}").is_file()]
    if reader == "folder" or (reader is None and not lists):
        return "folder", path, {}
    if len(lists) != 1:
        raise DataError(f"{path}: {len(lists)} lists (manifest.csv, manifest.parquet); name the file of the list")
    return guess_reader(lists[0], "manifest")
