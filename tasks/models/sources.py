"""Images to embed, from a folder, a list or an object store. Names are read at once, bytes when needed."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dml_core.data.readers.shared.lists import read_list
from dml_core.data.readers.shared.own import is_image_name, is_list_name
from dml_core.data.readers.shared.rules import check_utf8
from dml_core.data.store.rows import Box
from dml_core.errors import DataError, printable
from dml_core.files import read_regular
from tasks.storage import Store
from tasks.wording import counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Images:
    """Images in order.

    Attributes:
        names: name of each, unique if the source's are: a path relative to the source.
        classes: class of each; None if the source has none.
        boxes: box of each; None if there are none.
        root: the folder that contains them, or `s3://bucket/prefix`.
        read: returns the encoded bytes of the image at a position of the list; raises OSError or StoreError if it cannot be read.
        version: returns a text for the image at a position that differs once the image was replaced: size and time, or ETag.
    """

    names: list[str]
    classes: list[str] | None
    boxes: list[Box | None] | None
    root: str
    read: Callable[[int], bytes]
    version: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.names)

    def without(self, names: Collection[str]) -> "Images":
        """Return the images with other names."""
        places = [place for place, name in enumerate(self.names) if name not in names]
        return Images(
            [self.names[place] for place in places],
            None if self.classes is None else [self.classes[place] for place in places],
            None if self.boxes is None else [self.boxes[place] for place in places],
            self.root,
            lambda place: self.read(places[place]),
            lambda place: self.version(places[place]),
        )


def find_images(source: str) -> Images:
    """Find the images of a source.

    Args:
        source: a folder, with or without one subfolder per class; a CSV or Parquet file with the column `path` and optionally `label` and a
            box (`left`, `top`, `right`, `bottom`), other columns are ignored; or `s3://bucket/prefix`.

    Raises:
        DataError: there are none, or the list cannot be read.
        StoreError: the bucket cannot be read.
    """
    if source.startswith("s3://"):
        images = _in_bucket(source)
    elif is_list_name(Path(source)):
        images = _in_list(Path(source))
    else:
        images = _in_folder(Path(source))
    if not len(images):
        raise DataError(f"{source}: no images found (recognised by suffix: .jpg, .png, ...)")
    return images


def _image_names(names: Sequence[str], source: str) -> list[str]:
    """Return the names of images, in their order; a warning counts the others by suffix."""
    images = [name for name in names if is_image_name(PurePosixPath(name))]
    if len(images) < len(names):
        others = Counter(PurePosixPath(name).suffix.lower() or "none" for name in {*names}.difference(images))
        suffixes = ", ".join(f"{suffix} {number}" for suffix, number in sorted(others.items()))
        left_out = f"{source}: left out {counted(others.total(), 'file')} without an image's suffix ({suffixes})"
        logger.warning("%s", printable(left_out))
    return images


def _in_folder(folder: Path) -> Images:
    if not folder.is_dir():
        problem = "neither a folder nor a list" if folder.exists() else "no such folder"
        raise DataError(f"{folder}: {problem}; name a folder of images, a .csv or .parquet list, or s3://bucket/prefix")
    names = _image_names([path.as_posix() for path in sorted(path.relative_to(folder) for path in _paths(folder))], str(folder))
    for name in names:
        check_utf8(name, folder)
    return _in_files(names, _parents(names, str(folder)), None, folder.absolute())


def _in_files(names: list[str], classes: list[str] | None, boxes: list[Box | None] | None, root: Path) -> Images:
    def version(place: int) -> str:
        """Return a file's size and time of change; empty if it is missing."""
        try:
            status = (root / names[place]).stat()
        except (OSError, ValueError):  # ValueError: a path with a NUL
            return ""
        return f"{status.st_size} {status.st_mtime_ns}"

    return Images(names, classes, boxes, str(root), lambda place: read_regular(root / names[place]), version)


def _paths(folder: Path) -> Iterator[Path]:
    """Yield everything below `folder` that is not a folder, including dangling links and pipes, which are unreadable.

    Links to folders are followed, except to a folder that contains them. Hidden files and folders are skipped.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror or error})")

    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        inside = Path(place)
        above = [folder, *(folder / part for part in inside.relative_to(folder).parents)] if inside != folder else []
        if inside.is_symlink() and any(outer.resolve().is_relative_to(inside.resolve()) for outer in above):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (inside / name for name in files if not name.startswith("."))


def _in_bucket(address: str) -> Images:
    store = Store(address, Path())  # its client is created on first use, so that this store can be sent to other machines
    etags = Store(address, Path()).list_objects(is_first=True)
    names = _image_names(sorted(etags), address)
    return Images(names, _parents(names, address), None, address, lambda place: store.read(names[place]), lambda place: etags[names[place]])


def _in_list(path: Path) -> Images:
    entries = read_list(path, is_dataset=False)
    classes = [entry.label for entry in entries if entry.label is not None]
    boxes = [entry.box for entry in entries]
    return _in_files([entry.path for entry in entries], classes or None, boxes if any(boxes) else None, path.absolute().parent)


def _parents(names: list[str], source: str) -> list[str] | None:
    """Return each image's parent folder as its class; None if some have no parent folder, with a warning if others have."""
    parents = [PurePosixPath(name).parent.name for name in names]
    num_stray = parents.count("")
    if 0 < num_stray < len(names):
        stray = f"{counted(num_stray, 'image')} outside of its folders (the first: {names[parents.index('')]})"
        logger.warning("%s", printable(f"{source}: no image gets a class because of {stray}; for classes move all images into folders"))
    return None if num_stray else parents
