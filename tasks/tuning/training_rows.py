"""Pack the training rows of a dataset separately: a search's runs get only these and cannot read test images."""

from pathlib import Path

import pyarrow.parquet as pq

from dml_core.data.prepare import pack
from dml_core.data.store.info import MANIFEST_FILE, DatasetInfo, read_info, verify_files
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Manifest, Role, Row
from dml_core.errors import DataError
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
        info = _packed_earlier(folder) or pack(source.name, source.options, _manifest(packed), folder)
    counts = {role: entry.num_images for role, entry in info.roles.items()}
    return DatasetRecord(name=name, folder=str(folder), digest=info.fingerprint, counts=counts, source=info.name)


def _packed_earlier(folder: Path) -> DatasetInfo | None:
    """Return the dataset packed earlier if it is complete and its rows are all training rows; otherwise None."""
    try:
        info = verify_files(folder)
        roles = set(pq.read_table(folder / MANIFEST_FILE, columns=["role"])["role"].to_pylist())
    except (OSError, DataError, ValueError):
        return None
    return info if roles == {ROLE} == set(info.roles) else None


def _manifest(packed: Path) -> Manifest:
    images = PackedDataset(packed, ROLE)
    names = images.class_names
    numbers = {path: index for index, path in enumerate(images.paths)}
    rows = [
        Row(path, int(images.labels[index]), names[images.labels[index]], ROLE, images.box(index))
        for index, path in enumerate(images.paths)
    ]
    return Manifest(rows, lambda row: images.raw_bytes(numbers[row.path]))
