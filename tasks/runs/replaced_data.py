"""Effects on runs of replacing a prepared dataset's images: flows that use it would lose those that are not finished, and classes may move.

The locks of such flows are next to the packed data, which the copies of `dml verify` share with their project.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from socket import gethostname
from uuid import uuid4

from dml_core.data.readers.shared.contract import DatasetConfig
from dml_core.data.store.info import MANIFEST_FILE, read_info
from dml_core.errors import DataError, StoreError, printable
from tasks.environment import Project
from tasks.locks import RUNNING, FileLock, running_since
from tasks.runs.records import DatasetRecord, check_unchanged

MAX_NAMED = 5  # classes in a warning
logger = logging.getLogger(__name__)


def use_packed(project: Project, name: str) -> FileLock:
    """Take a lock that shows, while it is held, that this process uses a prepared dataset; none where packed data can only be read."""
    lock = FileLock(_folder(project, name) / f"{RUNNING}{uuid4().hex}@{gethostname()}")
    try:
        lock.acquire()
    except StoreError as error:
        logger.debug("%s: not marked as in use: %s", name, error)
    return lock


def users(project: Project, name: str) -> str:
    """Return the processes that use a prepared dataset, for messages; empty if there are none."""
    folder = _folder(project, name)
    if running_since(folder) == inf:
        return ""
    hosts = {path: path.name.partition("@")[2] for path in folder.glob(f"{RUNNING}*")}
    here = "", gethostname()
    return " and ".join(sorted({FileLock(path).holder() + (f" on {host}" if host not in here else "") for path, host in hosts.items()}))


def check_unused(project: Project, name: str) -> None:
    """Check that no process uses a prepared dataset.

    Raises:
        DataError: one does.
    """
    if who := users(project, name):
        raise DataError(f"{name}: in use by {who}, whose runs would be lost if other images replaced these; run this again when it ends")


def check_before_packing(project: Project, name: str, dataset: DatasetConfig, raw: Path) -> None:
    """Check that no process uses a prepared dataset that would get other rows or sizes; whether its images differ, packing shows.

    Raises:
        DataError: one does.
    """
    if users(project, name) and _has_others(project.packed(name), dataset, raw):
        check_unused(project, name)


def _has_others(packed: Path, dataset: DatasetConfig, raw: Path) -> bool:
    """Return whether raw files and options have other rows or sizes than packed data; False if these or those cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with suppress(pa.ArrowException, OSError, DataError):
        sizes = dataset.model_dump(mode="json", include={"stored_size", "stored_interpolation"})
        rows = pq.read_table(packed / MANIFEST_FILE, columns=["path", "label_name", "role"]).to_pylist()
        present = [{"path": row.path, "label_name": row.label_name, "role": row.role} for row in dataset.read(raw).rows]
        return rows != present or not sizes.items() <= (sizes | read_info(packed).options).items()
    return False


def _folder(project: Project, name: str) -> Path:
    return project.packed(name).parent / f".{name}.users"


@contextmanager
def of_same_data(dataset: DatasetRecord, clear: Callable[[], object]) -> Iterator[None]:
    """Clear the body's output if a dataset was prepared again with other images meanwhile, by something that does not ask for its users.

    Raises:
        DataError: it was, or before the body; or it was removed or cannot be read: the output stays, and is used with the same images.
    """
    check_unchanged(dataset)
    yield
    try:
        check_unchanged(dataset)
    except DataError:
        with suppress(DataError):
            read_info(Path(dataset.folder))
            clear()
        raise


@contextmanager
def warning_of_moved_classes(project: Project, name: str) -> Iterator[None]:
    """Warn of the classes that are for training before the body packs a dataset and for scoring afterwards, or the other way round."""
    before = _roles_of_classes(project.packed(name))
    yield
    now = _roles_of_classes(project.packed(name))
    moved = sorted(
        ("train" in now[label], label) for label in before.keys() & now.keys() if ("train" in before[label]) != ("train" in now[label])
    )
    if moved:
        roles = [f"{label} {before[label]} -> {now[label]}" for _, label in moved[:MAX_NAMED]] + ["..."] * (len(moved) > MAX_NAMED)
        logger.warning(
            "%s: %d class%s changed role: %s; networks that were trained before may be scored on classes that they were trained on; "
            "to keep roles, write them (docs/tutorials/own-images.md)",
            *(name, len(moved), "" if len(moved) == 1 else "es", printable(", ".join(roles))),
        )


def _roles_of_classes(packed: Path) -> dict[str, str]:
    """Return class -> role in a packed dataset, of several roles "A and B"; empty if there is none, or it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    roles: dict[str, str] = {}
    with suppress(pa.ArrowException, OSError):
        rows = pq.read_table(packed / MANIFEST_FILE, columns=["label_name", "role"]).to_pydict()
        for label, role in sorted(set(zip(rows["label_name"], rows["role"], strict=True))):
            roles[label] = f"{roles[label]} and {role}" if label in roles else role
    return roles
