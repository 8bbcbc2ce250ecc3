"""Records that MLflow has not accepted yet: one sealed file each; a damaged one is renamed and never overwritten."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dml_core.errors import StoreError
from tasks.locks import alone
from tasks.runs.records import ComparisonReport, RunReport
from tasks.sealed import DamagedError, move_damaged, read_or_set_aside, read_sealed, write_sealed

OUTBOX = "outbox"  # folder in the state
KEPT_AT = "kept_at"  # field that a report has there in addition
Report = RunReport | ComparisonReport
REPORT: Any = Report  # a union is no type to mypy


def keep_report(outbox: Path, report: Report) -> Path:
    """Write a report into the outbox and return its file; it has waited as long as the same run's report if that waits there.

    Raises:
        StoreError: the outbox cannot be written, or a newer version of the program wrote the report that waits there.
    """
    path, kept_at = outbox / report.outbox_name, time.time()
    if (before := read_or_set_aside(path, REPORT)) is not None:
        since = {KEPT_AT: waits_since(path, before)}
        if before.model_copy(update={"tags": report.tags} | since).model_dump_json() == report.model_copy(update=since).model_dump_json():
            kept_at = since[KEPT_AT]
    write_sealed(path, report.model_copy(update={KEPT_AT: kept_at}))
    return path


def waits_since(path: Path, report: Report) -> float:
    """Return when a report of the outbox was kept: of an older version's the time of its file, which a copy of a project changes."""
    return float((report.model_extra or {}).get(KEPT_AT, path.stat().st_mtime))


def read_report(path: Path) -> Report:
    """Return a report from the outbox. A damaged one is renamed first.

    Raises:
        DamagedError: it is damaged; the error gives its new name.
        StoreError: it cannot be read, or a newer version of the program wrote it; it stays.
    """
    try:
        report = read_sealed(path, REPORT)
    except DamagedError as error:
        raise DamagedError(f"{error}, kept as {move_damaged(path).name}; `dml reproduce` publishes it again") from None
    assert report is not None, "its lock is held"
    return report


def runs_wait(outbox: Path, comparison: str, locks: Path) -> bool:
    """Return whether a record of a comparison's runs waits, after any deliveries of them, which hold its lock in the folder `locks`.

    Records that cannot be read do not count.
    """
    for path in sorted(outbox.glob("[!~]*.json")):  # a comparison's begins with ~
        with suppress(StoreError):  # records that cannot be read do not count
            report = read_sealed(path, REPORT)  # None if it was delivered meanwhile
            if report is not None and report.comparison == comparison:
                with alone(locks / path.name):
                    if path.exists():
                        return True
    return False
