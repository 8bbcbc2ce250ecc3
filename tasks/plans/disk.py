"""Estimate the disk space that an unprepared dataset needs: its archive, unpacked, packed and in DVC's cache."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.registry import DATASETS, dataset_class


@dataclass(frozen=True)
class DiskNeed:
    """Additional disk space that a dataset or runs will need.

    Attributes:
        what: what needs the space, in words.
        num_bytes: None if unknown: the publisher states no size, and the files are not on this machine.
    """

    what: str
    num_bytes: int | None


def dataset_disk(reader: str, raw: Path | None) -> DiskNeed | None:
    """Return the disk space that an unprepared dataset needs. Packing keeps the files' bytes, and archives do not shrink JPEGs.

    DVC keeps a copy of the packed data in its cache; a file system that can share blocks (not ext4) stores both once.

    Args:
        reader: the dataset's reader.
        raw: its raw folder; None if params.yaml does not name one.

    Returns:
        None unless the reader is that of a published dataset with archives.
    """
    kind = dataset_class(reader) if reader in DATASETS else None
    if kind is None or not issubclass(kind, OfficialDataset) or not kind.archives:
        return None
    sizes = {path: path.stat().st_size for path in raw.rglob("*") if path.is_file()} if raw is not None and raw.is_dir() else {}
    names = {archive.file_name.rpartition("/")[2] for archive in kind.archives if archive.unpacked != archive.file_name}
    of_archives = sum(size for path, size in sizes.items() if path.name in names)
    unpacked = sum(sizes.values()) - of_archives
    if unpacked > of_archives // 2:  # annotations alone are smaller
        return DiskNeed(f"{reader} packed, and DVC's copy", 2 * unpacked)
    if of_archives:
        return DiskNeed(f"{reader} unpacked, packed, and DVC's copy", 3 * of_archives)
    published = [archive.num_bytes for archive in kind.archives]
    known = [size for size in published if size is not None]
    return DiskNeed(f"{reader} as archive, unpacked, packed, and DVC's copy", 4 * sum(known) if len(known) == len(published) else None)


def total_bytes(needs: Iterable[DiskNeed]) -> int:
    """Return the sum of the known sizes."""
    return sum(need.num_bytes or 0 for need in needs)
