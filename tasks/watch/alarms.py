"""Raise and end alarms after a verification: one for each row that drifted, failed or vanished, until it is reproduced or not accepted.

A row that failed has an alarm until it is trained to its end, one that vanished until the project has it again.

An alarm is written to the state first and sent afterwards, with the id of its event; if the process dies in between, the next call sends
the same event, and Prefect's server acts once on an id. `infra/automations.yaml` turns events into calls of a webhook.

| event | resource | when |
|---|---|---|
| `dml.verified` | `dml.verification.<name>` | an accepted name's turn came, and any row has a verdict; its absence tells a night without |
| `dml.alarm` | `dml.alarm.<cause>` | a cause is new |
| `dml.recovered` | `dml.alarm.<cause>` | it is over |
"""

import hashlib
import logging
import shlex
from collections.abc import Sequence, Set
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import requests

from dml_core.errors import TrackingError
from tasks.environment import Project, prefect_server
from tasks.files import write_whole
from tasks.locks import alone
from tasks.reports.table_pages import INDEX, SITE, SITE_LOCK, index_page
from tasks.sealed import read_or_set_aside, write_sealed
from tasks.stack.prefect_api import prefect_session
from tasks.tables.alarms import ALARMS, ALARMS_FILE, Alarm
from tasks.tracking.alarm_marks import mark_comparisons
from tasks.watch.history import write_history
from tasks.watch.records import Verdict, Verification
from tasks.watch.storage import read_references

SECONDS = 10
REMEDIES = {
    Verdict.DRIFTED: "find the first difference named here and undo it, or make the new result the reference: dml accept {name} --why ...",
    Verdict.FAILED: "correct the error, then: dml verify {name} --row {row}",
    Verdict.VANISHED: "restore the row, or accept {name} without it: dml accept {name} --why ...; "
    "if the project has no {name} any more, remove its file from results/accepted",
}
logger = logging.getLogger(__name__)


def notify(project: Project, *verifications: Verification) -> list[Alarm]:
    """Update the alarms by the verifications of one execution, send what is new, mark MLflow and the pages; return the alarms that last.

    An accepted row that was not verified keeps its alarms. A command that gets an alarm ends with exit code 1.

    Raises:
        NewerFormatError, StoreError: the file of alarms cannot be read or written, or a reference is damaged.
    """
    references = read_references(project)
    accepted = {(name, one.row) for name, reference in references.items() for one in reference.evidence}
    path = project.state / ALARMS_FILE
    with alone(path.with_name(f".{ALARMS_FILE}.lock")):
        before = read_or_set_aside(path, ALARMS) or {}
        alarms = _updated(before, verifications, accepted)
        write_sealed(path, alarms)
        server = prefect_server()
        of_accepted = [verification for verification in verifications if verification.name in references]
        has_verdicts = any(row.verdict is not Verdict.NEW for verification in of_accepted for row in verification.rows)
        events = [_verified(verification) for verification in of_accepted if has_verdicts]
        events += [_event(alarm) for alarm in alarms.values() if alarm.event]
        if server and (not events or _send(server, events)):
            alarms = {cause: alarm.model_copy(update={"event": None}) for cause, alarm in alarms.items()}
        alarms = {cause: alarm for cause, alarm in alarms.items() if alarm.ended is None or (alarm.event is not None and server)}
        write_sealed(path, alarms)
    lasting = sorted((alarm for alarm in alarms.values() if alarm.ended is None), key=lambda alarm: (alarm.since, alarm.cause))
    if project.is_tracked:  # else its alarms are only in the other places
        for name in dict.fromkeys([*(verification.name for verification in verifications), *(alarm.name for alarm in before.values())]):
            try:
                mark_comparisons(project.tracking_uri, project.state, name, [alarm.text for alarm in lasting if alarm.name == name])
            except TrackingError as error:
                logger.warning("%s; its comparisons do not show the alarms of %s", error, name)
    folder = project.root / SITE
    with alone(project.state / SITE_LOCK):
        write_history(project, references)
        if (folder / INDEX).is_file():
            write_whole(folder / INDEX, index_page(folder, lasting))
    return lasting


def _updated(alarms: dict[str, Alarm], verifications: Sequence[Verification], accepted: Set[tuple[str, str]]) -> dict[str, Alarm]:
    """Return the alarms after verifications: new causes added, causes that are over marked as ended.

    A cause is over if its row was verified without it, or is no longer accepted; `accepted` has name and row of all accepted rows. Drift is
    not over if a run of the row failed: nothing was compared.
    """
    raised = _raised(verifications)
    verified = {(verification.name, row.row) for verification in verifications for row in verification.rows}
    bad = {(alarm.name, alarm.row) for alarm in raised.values()}
    after: dict[str, Alarm] = {}
    for cause, alarm in alarms.items():
        row, at = (alarm.name, alarm.row), verifications[0].started_at
        lasts = row in bad and cause == f"{alarm.name} {alarm.row} {Verdict.DRIFTED}"
        is_over = alarm.ended is None and cause not in raised and ((row in verified and not lasts) or row not in accepted)
        after[cause] = alarm.model_copy(update={"ended": at, "event": _event_id(cause, at, "recovered")}) if is_over else alarm
    return after | {cause: alarm for cause, alarm in raised.items() if cause not in after or after[cause].ended is not None}


def _raised(verifications: Sequence[Verification]) -> dict[str, Alarm]:
    """Return cause -> alarm that verifications raise; of a row's seeds with the same verdict, that of the first."""
    alarms: dict[str, Alarm] = {}
    for verification in verifications:
        for row in verification.rows:
            if row.is_bad:
                cause = f"{verification.name} {row.row} {row.verdict}"
                changed = f" Changed: {', '.join(row.changed)}." if row.changed else ""
                alarm = Alarm(
                    cause=cause,
                    name=verification.name,
                    row=row.row,
                    since=verification.started_at,
                    commit=verification.commit,
                    text=f"{row.row}, seed {row.seed}: {row.verdict}: {row.reason.rstrip('.')}.{changed}",
                    remedy=REMEDIES[row.verdict].format(name=verification.name, row=shlex.quote(row.row)),
                    event=_event_id(cause, verification.started_at, "alarm"),
                )
                alarms.setdefault(cause, alarm)
    return alarms


# ---------------------------------------------------------------- events of Prefect's server


def _event_id(cause: str, at: datetime, kind: str) -> str:
    return str(uuid5(NAMESPACE_URL, f"dml-repro {kind} {cause} {at.isoformat()}"))


def _event(alarm: Alarm) -> dict[str, Any]:
    """Return the event of an alarm that is new, or over."""
    is_over = alarm.ended is not None
    text = f"recovered: {alarm.cause}" if is_over else alarm.text
    return _as_event(
        str(alarm.event),
        "dml.recovered" if is_over else "dml.alarm",
        f"dml.alarm.{hashlib.sha256(alarm.cause.encode()).hexdigest()[:16]}",
        {"cause": alarm.cause, "text": text, "remedy": "" if is_over else alarm.remedy, "commit": alarm.commit},
    )


def _verified(verification: Verification) -> dict[str, Any]:
    identity = _event_id(verification.name, verification.started_at, "verified")
    return _as_event(
        identity, "dml.verified", f"dml.verification.{verification.name}", {"name": verification.name, "commit": verification.commit}
    )


def _as_event(identity: str, event: str, resource: str, payload: dict[str, str]) -> dict[str, Any]:
    occurred = datetime.now(UTC).isoformat()
    return {"id": identity, "event": event, "occurred": occurred, "resource": {"prefect.resource.id": resource}, "payload": payload}


def _send(server: str, events: list[dict[str, Any]]) -> bool:
    """Send events to Prefect's server; return whether it has them. If not, the next verification sends those of alarms again."""
    try:
        prefect_session().post(f"{server.rstrip('/')}/events", json=events, timeout=SECONDS).raise_for_status()
    except requests.RequestException as error:
        logger.warning(
            "Prefect's server did not take the events of this verification (%s); the next one sends those of alarms", type(error).__name__
        )
        return False
    return True
