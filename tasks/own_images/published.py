"""Add a published dataset to the project: unpack its archive or use its folder, check it, and write its block into `params.yaml`."""

from pathlib import Path

from dml_core.config import parse
from dml_core.data.readers.shared.archives import check_md5, unpack
from dml_core.data.registry import materialise, parse_dataset, published_dataset
from dml_core.data.store.rows import role_counts
from dml_core.errors import DataError
from dml_core.files import write_errors
from tasks.environment import Project
from tasks.own_images.add import Added, as_linked, as_raw, check_new_name, write_dataset
from tasks.runs.params.file import check_raw_places, load_params
from tasks.runs.specs import DatasetSpec


def add_published(project: Project, name: str, path: Path, is_part: bool = False) -> Added:
    """Add a published dataset to the project and write its block into `params.yaml`; the archive is not moved.

    Args:
        name: the dataset's reader, which is its name in the papers' tables.
        path: one of the publisher's archives, unpacked to `data/raw/<name>`; or a folder with the files, which is used in place.
        is_part: True for a part of the dataset: the archive's checksum and the counts are not compared with the published ones.

    Raises:
        ConfigError: the name is taken, or another dataset has the folder.
        DataError: the file does not exist or is not the publisher's, or the files are not the published dataset.
        StoreError: the data or `params.yaml` cannot be written.
    """
    params = load_params(project.params_file)
    check_new_name(name, params)
    raw = as_linked(path) if path.is_dir() else project.root.resolve() / "data" / "raw" / name
    options = {"published_counts": False} if is_part else {}
    spec = parse(DatasetSpec, {"reader": name, "raw": as_raw(project, raw), "options": options}, str(raw))
    check_raw_places(project.root, params.datasets | {name: spec})
    with write_errors(f"{raw}:", "free space or choose another folder"):
        if path.is_dir():
            materialise(name, options, raw)
        else:
            _unpack(name, path.resolve(), raw, is_part)
    rows = parse_dataset(name, options).read(raw).rows
    return Added(spec, role_counts(rows), write_dataset(project, name, spec))


def _unpack(name: str, path: Path, raw: Path, is_part: bool) -> None:
    """Unpack the archive that holds the whole dataset; refuse it if one is unpacked already, which may be another."""
    kind = published_dataset(name)
    assert kind is not None
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder; {kind.how_to_get}")
    archives = {archive.file_name: archive for archive in kind.archives if archive.unpacked != archive.file_name}
    if path.name not in archives or len(kind.archives) > 1:
        alone_enough = f"{', '.join(archives)} or " if len(kind.archives) == 1 else ""
        raise DataError(f"{path}: expected {alone_enough}the folder with all of the dataset's files; {kind.how_to_get}")
    archive = archives[path.name]
    if (raw / archive.unpacked).exists():
        raise DataError(f"{raw / archive.unpacked}: exists already; remove it, or add what it has: dml data add {name} {raw}")
    if archive.md5 and not is_part:
        check_md5(path, archive.md5)
    unpack(path, raw)
