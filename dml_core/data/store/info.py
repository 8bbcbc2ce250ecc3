"""`dataset.json` of a packed dataset: its contents, the hashes that identify it, and a hash of `dataset.json` itself.

A flow verifies the hashes when it starts (`verify_files`), before any step reads the files. Reading an image later verifies nothing,
because hashing takes a second per few hundred megabytes; the next flow detects a damaged image that still decodes.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from dml_core.config import Config
from dml_core.data.store.rows import Counts
from dml_core.errors import DataError, StoreError
from dml_core.files import file_sha256, read_regular, sealed, unsealed

FORMAT: Literal[2] = 2
INFO_FILE = "dataset.json"
IMAGES_FILE = "images.arrow"
MANIFEST_FILE = "manifest.parquet"
REMEDY = "run `dml data prepare` again"
OWN_READERS = frozenset({"folder", "manifest"})


class DatasetInfo(Config):
    """Description of a packed dataset.

    Attributes:
        format: version of the file format.
        name: the dataset's name in the registry.
        options: the dataset's options, including defaults.
        roles: counts per role.
        num_classes: classes of all roles together.
        images_sha256: hash of `images.arrow`.
        manifest_sha256: hash of `manifest.parquet`.
    """

    format: Literal[2] = FORMAT
    name: str
    options: dict[str, Any]
    roles: dict[str, Counts]
    num_classes: int
    images_sha256: str
    manifest_sha256: str

    @property
    def is_own(self) -> bool:
        """True for the user's own images, which are rotated upright by their EXIF orientation; others are decoded as stored."""
        return self.name in OWN_READERS

    @property
    def fingerprint(self) -> str:
        """One hash (16 hexadecimal digits) of images, labels, roles and boxes: the dataset's identity."""
        return hashlib.sha256(f"{self.images_sha256} {self.manifest_sha256}".encode()).hexdigest()[:16]


def verify_files(folder: Path) -> DatasetInfo:
    """Compare the files of a prepared folder with the hashes in its `dataset.json`, and return its contents.

    Raises:
        DataError: the folder holds no prepared dataset, or a file is missing or damaged.
    """
    info = read_info(folder)
    for path, expected in ((folder / IMAGES_FILE, info.images_sha256), (folder / MANIFEST_FILE, info.manifest_sha256)):
        try:
            actual = file_sha256(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); {REMEDY}") from None
        if actual != expected:
            raise DataError(f"{path}: damaged (SHA-256 differs); {REMEDY}")
    return info


def write_info(info: DatasetInfo, folder: Path) -> None:
    """Write `dataset.json` of a prepared folder; raises OSError."""
    (folder / INFO_FILE).write_text(sealed(info.model_dump(mode="json")), encoding="utf-8")


def read_info(folder: Path) -> DatasetInfo:
    """Read `dataset.json` of a prepared folder.

    Raises:
        DataError: the folder holds no prepared dataset or one of another format, or the file is damaged.
    """
    path = folder / INFO_FILE
    try:
        values = unsealed(read_regular(path), path, FORMAT, REMEDY)
        return DatasetInfo.model_validate_json(json.dumps(values))
    except FileNotFoundError:
        raise DataError(f"{folder}: no prepared dataset; run `dml data prepare {folder.name}`") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); remove it, and {REMEDY}") from None
    except StoreError as error:
        raise DataError(str(error)) from None
    except ValidationError:
        raise DataError(f"{path}: damaged; {REMEDY}") from None
