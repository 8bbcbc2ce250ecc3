"""`folder`: the user's own images, one directory per class.

Either `<class>/<image>`: the first half of the classes, by name, is for training and the rest for test; or `train/<class>/<image>` with
`test/<class>/<image>` (or `query/` and `gallery/`), which give the roles. Hidden files (also macOS's `._*`) are ignored.
"""

from pathlib import Path
from typing import ClassVar, get_args

from dml_core.data.readers.shared.contract import DatasetConfig
from dml_core.data.readers.shared.own import is_image_name, split_by_class
from dml_core.data.store.rows import Role, Row
from dml_core.errors import DataError


class Folder(DatasetConfig):
    """One directory per class in the raw folder."""

    own_images: ClassVar[bool] = True
    how_to_get: ClassVar[str] = "put one directory of images per class there"

    def rows(self, raw: Path) -> list[Row]:
        """Return rows by role, class name and file name; classes are numbered by name."""
        places = _class_folders(raw)
        numbers = {name: number for number, name in enumerate(sorted({folder.name for _, folder in places}))}
        return [
            Row(path.relative_to(raw).as_posix(), numbers[folder.name], folder.name, role)
            for role, folder in places
            for path in _images(folder)
        ]


def _class_folders(raw: Path) -> list[tuple[Role, Path]]:
    folders = _subfolders(raw)
    by_role: dict[Role, Path] = {role: raw / role for role in get_args(Role) if raw / role in folders}
    has_roles = "train" in by_role and len(by_role) == len(folders) > 1
    for top in (raw, *(by_role.values() if has_roles else ())):
        names = (path for path in sorted(top.iterdir()) if path.is_file() and not path.name.startswith("."))
        stray = next(filter(is_image_name, names), None)
        if stray is not None:
            raise DataError(f"{stray}: an image outside the folders of the classes; move it into one, or away")
    if has_roles:
        return [(role, folder) for role, top in by_role.items() for folder in _subfolders(top)]
    roles = split_by_class({folder.name for folder in folders})
    return [(roles[folder.name], folder) for folder in folders]


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    """Return the images of one class; anything else in its folder is an error, not skipped."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    inner = next((path for path in paths if path.is_dir()), None)
    if inner is not None:
        raise DataError(
            f"{inner}: a folder in a class's folder; name a folder of the classes' folders, or one that has only train/ and test/ of such"
        )
    strange = next((path for path in paths if not is_image_name(path)), None)
    if strange is not None:
        raise DataError(f"{strange}: not the name of an image that is read; convert it, as to JPEG, or move it out of its class's folder")
    if not paths:
        raise DataError(f"{folder}: the class has no images; add some or remove the folder")
    return paths
