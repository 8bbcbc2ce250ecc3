"""What datasets of a person's own share: image file names, the split by class where none is given, and which reader a place needs."""

from pathlib import Path, PurePath

from dml_core.data.store.rows import Role
from dml_core.errors import DataError

LIST_SUFFIXES = (".csv", ".parquet")
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"})


def is_image_name(path: PurePath) -> bool:
    """Whether the name says that the file is an image."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def split_by_class(names: set[str]) -> dict[str, Role]:
    """Role of each class: in order of their names, the first half trains, the rest tests, as in CUB."""
    ordered = sorted(names)
    return {name: "train" if index < len(ordered) // 2 else "test" for index, name in enumerate(ordered)}


def guess_reader(path: Path, reader: str | None) -> tuple[str, Path, dict[str, str]]:
    """The reader of a place, its raw folder, and that reader's options.

    Args:
        path: a folder, or a list of images (CSV or Parquet).
        reader: "folder" or "manifest" where a person says which; None takes the list where there is one.

    Raises:
        DataError: there is nothing, no list where one is wanted, or several.
    """
    if path.is_file() and path.suffix in LIST_SUFFIXES and reader != "folder":
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
