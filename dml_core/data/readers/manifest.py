"""`manifest`: the user's own images, listed in a CSV or Parquet file.

`shared/lists.py` has its columns; paths are relative to the raw folder, roles are train, test, query or gallery. Without roles the first
half of the classes, by name, is for training and the rest for test.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import ClassVar, get_args

from pydantic import field_validator

from dml_core.data.readers.shared.contract import DatasetConfig
from dml_core.data.readers.shared.lists import read_list
from dml_core.data.readers.shared.own import split_by_class
from dml_core.data.store.rows import Role, Row, as_role
from dml_core.errors import DataError


class ManifestFile(DatasetConfig):
    """A list of images.

    Attributes:
        file: the list, in the raw folder or below it; `.parquet` is read as Parquet, anything else as CSV with a header.
    """

    own_images: ClassVar[bool] = True
    how_to_get: ClassVar[str] = "put the images and a manifest.csv with the columns path and label there"
    file: str = "manifest.csv"

    @field_validator("file")
    @classmethod
    def _in_the_raw_folder(cls, file: str) -> str:
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise ValueError(f"'{file}' leads out of the raw folder, and DVC does not notice changes there; move the list into it")
        return file

    def rows(self, raw: Path) -> list[Row]:
        """Return rows in the file's order; classes are numbered by name."""
        path = raw / self.file
        if not path.exists():
            raise DataError(f"{path}: no such file; {self.how_to_get}")
        entries = [(entry, str(entry.label)) for entry in read_list(path, is_dataset=True)]
        names = {label for _, label in entries}
        numbers = {name: number for number, name in enumerate(sorted(names))}
        by_class = split_by_class(names)
        return [
            Row(entry.path, numbers[label], label, by_class[label] if entry.role is None else _role(entry.role, path, number), entry.box)
            for number, (entry, label) in enumerate(entries, start=1)
        ]

    def notes(self, raw: Path) -> Mapping[str, list[str]]:
        """Return the files in the raw folder that are not in the list."""
        listed = {PurePosixPath(entry.path) for entry in read_list(raw / self.file, is_dataset=True)}
        files = {PurePosixPath(path.relative_to(raw)) for path in raw.rglob("*") if path.is_file()} - {PurePosixPath(self.file)}
        return {"not in the list, but hashed by DVC with the folder": sorted(map(str, files - listed))}


def _role(text: str, path: Path, number: int) -> Role:
    found = as_role(text)
    if found is None:
        raise DataError(f"{path}: row {number} has role '{text}', which is none of {', '.join(get_args(Role))}")
    return found
