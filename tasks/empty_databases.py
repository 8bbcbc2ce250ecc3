"""This user's empty SQLite databases of Prefect and MLflow, which new projects copy, because their migrations take seconds.

A copy is a file in the user's cache. Its name begins with the package's exact version and ends with the hash of its content; a damaged or
incomplete one is not used. It is only a saving: without one, or if it cannot be read or written, the package creates its database itself.
"""

import hashlib
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from tasks.files import write_whole

UNAVAILABLE = (OSError, RuntimeError)  # it cannot be read or written, or the user has no home folder


def read_empty_database(name: str) -> bytes | None:
    """Return the content of the kept database of a package, for example `prefect-3.8.8`; None if there is none that is intact."""
    with suppress(*UNAVAILABLE):
        for path in _path(name, b"").parent.glob(f"{name}-*.db"):
            data = path.read_bytes()
            if path == _path(name, data):
                return data
    return None


def keep_empty_database(name: str, database: Path) -> None:
    """Keep a database that has just been created and holds no project's records, for `read_empty_database`."""
    with suppress(sqlite3.Error, *UNAVAILABLE):  # the next project creates its own
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            data = connection.serialize()
        write_whole(_path(name, data), data)


def _path(name: str, data: bytes) -> Path:
    from dml_core.data.readers.shared.packages import cache_folder  # takes a tenth of a second

    return cache_folder() / f"{name}-{hashlib.sha256(data).hexdigest()[:32]}.db"
