"""The training rows of a dataset, packed alone: all that a search's runs are given, so that there are no test images for them to read."""

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
    """A prepared dataset's training rows as a packed dataset of their own, below the project's state; made once for each content.

    Args:
        project: whose state keeps it.
        name: of the dataset.
        packed: its folder.

    Raises:
        DataError: it is not prepared, or damaged.
        StoreError: the state cannot be written.
    """
    source = read_info(packed)
    folder = project.state / "tuning" / "datasets" / source.fingerprint
    with alone(folder.parent / f".{source.fingerprint}.lock"):  # another shell's search may want the same
        info = _kept(folder) or pack(source.name, source.options, _manifest(packed), folder)
    counts = {role: entry.num_images for role, entry in info.roles.items()}
    return DatasetRecord(name=name, folder=str(folder), digest=info.fingerprint, counts=counts, source=info.name)


def _kept(folder: Path) -> DatasetInfo | None:
    """What was packed before, if it is whole and has no other rows than training ones, by the rows themselves."""
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
