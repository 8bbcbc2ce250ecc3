"""Alarms of the verification, as they stand: `alarms.json` in the state folder, sealed. `tasks.watch.alarms` raises and ends them."""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import AwareDatetime

from dml_core.errors import StoreError
from tasks.environment import Project
from tasks.runs.records import Record
from tasks.sealed import DamagedError, read_sealed

ALARMS_FILE = "alarms.json"
NO_VERDICT = "no reference"  # of a row


class Alarm(Record):
    """One cause of alarm.

    Attributes:
        cause: `<table or dataset> <row> <verdict>`, to read only: rows of tables contain spaces. A cause raises one alarm until it is over.
        since: begin of the verification that found it.
        commit: commit of that verification.
        text: what is wrong, in one sentence.
        remedy: what to do.
        ended: begin of the verification that found it over; None while it lasts.
        event: id of the event that is still to be sent; None when Prefect's server has it.
    """

    cause: str
    name: str
    row: str
    since: AwareDatetime
    commit: str
    text: str
    remedy: str
    ended: AwareDatetime | None = None
    event: str | None = None


ALARMS = dict[str, Alarm]


def read_alarms(state: Path) -> dict[str, Alarm]:
    """Return cause -> alarm, of alarms that last or whose end is still to be sent.

    Raises:
        DamagedError, NewerFormatError, StoreError: as `read_sealed`.
    """
    try:
        return read_sealed(state / ALARMS_FILE, ALARMS) or {}
    except DamagedError as error:
        raise DamagedError(f"{error}; move it away, then dml verify raises its alarms again") from None


def open_alarms(state: Path) -> list[Alarm]:
    """Return the alarms that last, the oldest first; raises as `read_alarms`."""
    return sorted((alarm for alarm in read_alarms(state).values() if alarm.ended is None), key=lambda alarm: (alarm.since, alarm.cause))


def last_verification(project: Project) -> datetime | None:
    """Return when the newest verification of accepted results with a verdict on one began; None if there was none.

    Those of the future are omitted, which began while the clock was wrong: they would hide missed nights until then.
    """
    for path in sorted((project.state / "verifications").glob("[0-9]*T[0-9]*Z-*.json"), reverse=True):
        stamp, name = path.name.split("-", 1)
        is_accepted, time = (project.root / "results" / "accepted" / name).is_file(), datetime.fromisoformat(stamp)
        if is_accepted and time <= datetime.now(UTC) and _has_verdict(path):
            return time
    return None


def _has_verdict(path: Path) -> bool:
    """Return whether a verification compared a row, or could not: not one in which no row was trained, as on a cluster without room."""
    with suppress(StoreError):
        return any(row["verdict"] != NO_VERDICT for row in (read_sealed(path, dict[str, Any]) or {}).get("rows", ()))
    return False
