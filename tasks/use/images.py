"""Images that a person names: a folder of them, or a list (CSV, Parquet); classes are kept where they are known, and nobody needs any."""

from pathlib import Path
from typing import NamedTuple

from dml_core.data.readers.manifest import box_of, read_records
from dml_core.data.readers.shared.own import LIST_SUFFIXES, is_image_name
from dml_core.data.store.rows import Box
from dml_core.errors import DataError


class ListedImage(NamedTuple):
    """An image of a folder or list.

    Attributes:
        name: its path in the folder or list, with forward slashes.
        path: its file.
        class_name: of a list, its label; in a folder, the folder that it is in, unless that is the one that was named.
        box: of a list, where it has boxes.
    """

    name: str
    path: Path
    class_name: str | None = None
    box: Box | None = None


def listed_images(source: Path) -> list[ListedImage]:
    """The images of a folder with all folders in it, by name, or those of a list, in its order. Hidden files are not looked at.

    Raises:
        DataError: there is nothing of the kind, or it has no image.
    """
    if source.is_file() and source.suffix.lower() in LIST_SUFFIXES:
        found = _of_list(source)
    elif source.is_dir():
        found = _of_folder(source)
    elif source.is_file() and is_image_name(source):
        found = [ListedImage(source.name, source)]
    else:
        problem = "neither a folder, a list (.csv, .parquet) nor an image" if source.exists() else "no such folder or file"
        raise DataError(f"{source}: {problem}; name a folder of images or a list of them")
    if not found:
        raise DataError(f"{source}: no images there; name a folder of images or a list of them")
    return found


def _of_folder(folder: Path) -> list[ListedImage]:
    found = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if is_image_name(path) and not any(part.startswith(".") for part in inside.parts) and path.is_file():
            found.append(ListedImage(inside.as_posix(), path, inside.parent.name or None))
    return found


def _of_list(path: Path) -> list[ListedImage]:
    return [
        ListedImage(record["path"], path.parent / record["path"], record.get("label"), box_of(record, path, number))
        for number, record in enumerate(read_records(path, ("path",)), start=1)
    ]
