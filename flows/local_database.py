"""The database of the server of one flow: a copy of an empty one of the same Prefect, because its migrations take seconds.

It holds nothing essential and ends with the server: finished steps are found by Prefect's stored results, which are separate files. In the
state folder it would be shared by machines that share that, and SQLite's write-ahead log, which Prefect uses, is for one machine. Without
an intact copy (`tasks.empty_databases` proves it by a hash) the server creates its own, which only costs time.
"""

from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from tasks.empty_databases import UNAVAILABLE, keep_empty_database, read_empty_database


def copy_empty_database(home: Path) -> bool:
    """Copy this user's empty database of the installed Prefect into a server's folder; return whether there is one."""
    with suppress(*UNAVAILABLE):
        data = read_empty_database(_installed())
        if data is not None:
            (home / "prefect.db").write_bytes(data)
            return True
    return False


def keep_created_database(home: Path) -> None:
    """Keep a database that its server has just created, with no flow in it, for `copy_empty_database`."""
    keep_empty_database(_installed(), home / "prefect.db")


def _installed() -> str:
    return f"prefect-{version('prefect')}"
