"""Check the database of the server that Prefect starts for one flow, and replace it if it is damaged.

It holds nothing essential: finished steps are found by Prefect's stored results, which are separate files and not affected. A database that
the user configured, or a server's, is not touched.
"""

import logging
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from dml_core.errors import StoreError
from dml_core.files import set_aside
from tasks.locks import alone

OF_A_PERSON = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
NO_DAMAGE = ("database is locked", "database table is locked", "unable to open database file", "attempt to write a readonly database")
logger = logging.getLogger(__name__)


def set_aside_if_damaged(home: Path) -> None:
    """Rename Prefect's local database below `home` to `prefect.db.damaged-<N>` if SQLite finds it damaged, with a warning.

    Its write-ahead log is renamed with it, and is read with it under its new name.

    Raises:
        StoreError: it cannot be renamed.
    """
    path = home / "prefect.db"
    if any(os.environ.get(name) for name in OF_A_PERSON) or not path.exists():
        return
    if find_fault(path) is None:
        return
    with alone(home / ".set-aside.lock"):
        fault = find_fault(path) if path.exists() else None  # another process may have renamed it meanwhile, and created a new one
        if fault is None:
            return
        try:
            aside = set_aside(path)
            for suffix in ("-wal", "-shm"):
                with suppress(FileNotFoundError):
                    path.with_name(f"{path.name}{suffix}").rename(f"{aside}{suffix}")
        except OSError as error:
            raise StoreError(f"{path}: {fault}, and cannot be set aside ({error.strerror or error}); remove it") from None
    logger.warning("%s: %s; kept as %s and replaced by a new one; finished steps are not affected", path, fault, aside.name)


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a SQLite file, or None if it is sound or another process is writing it."""
    if not path.is_file():
        return "not a file"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=1)) as database:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        return None if str(error) in NO_DAMAGE else str(error)
    return None if verdict == "ok" else str(verdict).replace("\n", " ")
