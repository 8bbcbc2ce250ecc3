"""The database of the server of one flow: copied from an empty one of the same Prefect, and replaced if it is damaged or a newer one's.

It holds nothing essential: finished steps are found by Prefect's stored results, which are separate files and not affected. A database that
the user configured, or a server's, is not touched.
"""

import logging
import os
import re
import sqlite3
from contextlib import closing, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from dml_core.errors import StoreError
from dml_core.files import set_aside
from tasks.empty_databases import UNAVAILABLE, keep_empty_database, read_empty_database
from tasks.files import write_whole
from tasks.locks import alone

DATABASE_VARIABLES = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
NOT_DAMAGED = ("database is locked", "database table is locked", "unable to open database file", "attempt to write a readonly database")
logger = logging.getLogger(__name__)


def set_aside_if_damaged(home: Path) -> None:
    """Rename Prefect's local database below `home` to `prefect.db.damaged-<N>`, with a warning, if it is damaged or a newer Prefect's.

    Its write-ahead log is renamed with it, and is read with it under its new name.
    """
    path = home / "prefect.db"
    if any(os.environ.get(name) for name in DATABASE_VARIABLES) or not path.exists():
        return
    with alone(home / ".set-aside.lock"):
        fault = find_fault(path) if path.exists() else None  # another process may have renamed it meanwhile
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


def copy_empty_database(home: Path) -> bool:
    """Give a new project this user's empty database of the installed Prefect, whose migrations take seconds; return whether it has one.

    The server updates any database, so a missing or damaged copy only costs time.
    """
    path = home / "prefect.db"
    if any(os.environ.get(name) for name in DATABASE_VARIABLES):
        return True
    with suppress(*UNAVAILABLE), alone(home / ".set-aside.lock"):  # another flow's server must not have it open when it is replaced
        if path.exists():
            return True
        if path.with_name("prefect.db-wal").exists():  # of a lost database: SQLite would apply it to the copy
            return False
        data = read_empty_database(_installed())
        if data is not None:
            write_whole(path, data)
            return True
    return False


def keep_created_database(home: Path) -> None:
    """Keep a database that its server has just created, with no flow in it, for `copy_empty_database`."""
    keep_empty_database(_installed(), home / "prefect.db")


def _installed() -> str:
    return f"prefect-{version('prefect')}"


def _is_newer(revision: str) -> bool:
    """Return whether the installed Prefect does not know a revision of the database's tables: its server would end. Imports nothing."""
    spec = find_spec("prefect")
    assert spec is not None
    assert spec.origin is not None
    migrations = sorted((Path(spec.origin).parent / "server/database/_migrations/versions/sqlite").glob("*.py"), reverse=True)
    known = re.compile(rf"^revision\s*=\s*['\"]{re.escape(revision)}['\"]", re.MULTILINE)
    return bool(migrations) and not any(known.search(path.read_text(encoding="utf-8")) for path in migrations)


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a SQLite file of Prefect, or None if it is sound or another process is writing it."""
    if not path.is_file():
        return "not a file"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=1)) as database:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            has_revision = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'").fetchone()[0]
            revision = database.execute("SELECT version_num FROM alembic_version").fetchone() if has_revision else None
    except sqlite3.DatabaseError as error:
        return None if str(error) in NOT_DAMAGED else str(error)
    if verdict == "ok":
        return "a newer Prefect wrote it" if revision is not None and _is_newer(str(revision[0])) else None
    return str(verdict).replace("\n", " ")
