"""Pack the training rows of a dataset separately: a search's runs get only these and cannot read test images."""

from pathlib import Path

import pyarrow.parquet as pq

from dml_core.data.prepare import pack
from dml_core.data.store.info import MANIFEST_FILE, read_info, verify_files
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Manifest, Role, Row
from dml_core.errors import DataError
from tasks.data import read_packed
from tasks.environment import Project
from tasks.locks import alone
from tasks.runs.records import DatasetRecord

ROLE: Role = "train"


def training_rows(project: Project, name: str, packed: Path) -> DatasetRecord:
    """Return a prepared dataset's training rows as a separate packed dataset in the project's state, packed once for each content.

    Raises:
        DataError: the dataset is not prepared, or is damaged.
        StoreError: the state cannot be written.
    """
    source = read_info(packed)
    folder = project.state / "tuning" / "datasets" / source.fingerprint
    with alone(folder.parent / f".{source.fingerprint}.lock"):  # a search in another shell may need the same one
        if not _is_packed(folder):
            pack(source.name, source.options, _manifest(packed), folder)
    return read_packed(folder, name)


def _is_packed(folder: Path) -> bool:
    """Return whether a folder has a complete dataset, all of whose rows are training rows."""
    try:
        info = verify_files(folder)
        roles = set(pq.read_table(folder / MANIFEST_FILE, columns=["role"])["role"].to_pylist())
    except (OSError, DataError, ValueError):
        return False
    return roles == {ROLE} == set(info.roles)


def _manifest(packed: Path) -> Manifest:
    images = PackedDataset(packed, ROLE)
    names = images.class_names
    numbers = {path: index for index, path in enumerate(images.paths)}
    rows = [
        Row(path, int(images.labels[index]), names[images.labels[index]], ROLE, images.box(index))
        for index, path in enumerate(images.paths)
    ]
    return Manifest(rows, lambda row: images.raw_bytes(numbers[row.path]))
