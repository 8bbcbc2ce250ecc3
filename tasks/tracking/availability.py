"""Check in milliseconds, without importing MLflow, whether a tracking server or a local database can be used.

MLflow's own client tries for minutes to reach a server or to open an unreadable file, upgrades an older database without asking, and prints
pages of traces for one of a newer version.
"""

import re
import sqlite3
from contextlib import closing
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from dml_core.errors import TrackingError
from tasks.environment import answers, shown

SQLITE = "sqlite:///"
OPEN_SECONDS = 10.0  # wait for another process that is writing
_REVISION, _BELOW = (re.compile(rf"^{name}\s*=\s*['\"](\w+)['\"]", re.MULTILINE) for name in ("revision", "down_revision"))


def check_available(uri: str) -> None:
    """Check that a server listens at an address, or that a local database is of this version of MLflow; other kinds are not checked.

    Raises:
        TrackingError: it cannot be used; the error says what to do.
    """
    if uri.startswith(SQLITE):
        check_database(Path(uri.removeprefix(SQLITE)))
    elif uri.startswith("http") and not answers(uri):
        raise TrackingError(f"MLflow at {shown(uri)} cannot be used: no answer; start it, or correct MLFLOW_TRACKING_URI")


def check_database(path: Path) -> None:
    """Check a local database; a missing one is created on first use.

    Raises:
        TrackingError: it is damaged, not a file, or of another version of MLflow.
    """
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    where, mend = f"MLflow's database {path} cannot be used", "restore a copy, or move it away and publish again with dml reproduce"
    if not path.is_file():
        raise TrackingError(f"{where}: it is not a file; move it away")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=OPEN_SECONDS)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            found = database.execute("SELECT version_num FROM alembic_version").fetchone() if "alembic_version" in tables else None
    except sqlite3.Error as error:
        raise TrackingError(f"{where}: {error}; {mend}") from None
    if tables and found is None:
        raise TrackingError(f"{where}: it is not an MLflow database or incomplete; {mend}")
    known, newest = schemas()
    if found is not None and found[0] != newest:
        if found[0] in known:
            raise TrackingError(f"{where}: an older MLflow wrote it; back it up, then: mlflow db upgrade {SQLITE}{path}")
        raise TrackingError(f"{where}: a newer MLflow wrote it; install that version, or set MLFLOW_TRACKING_URI to another database")


@cache
def schemas() -> tuple[frozenset[str], str]:
    """Return the revisions of the database's tables that the installed MLflow knows, and the newest."""
    spec = find_spec("mlflow")
    assert spec is not None
    assert spec.origin is not None
    texts = [path.read_text(encoding="utf-8") for path in (Path(spec.origin).parent / "store/db_migrations/versions").glob("*.py")]
    known = frozenset(found[1] for text in texts if (found := _REVISION.search(text)))
    (newest,) = known - {found[1] for text in texts if (found := _BELOW.search(text))}
    return known, newest
