"""Alarms: each cause once, until the row is reproduced again; e2e/test_standing_comparison.py sends them through Prefect to a webhook."""

import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dml_core.errors import StoreError
from tasks import doctor
from tasks.environment import Project
from tasks.reports.table_pages import HISTORY, INDEX, SITE, index_page
from tasks.tables.alarms import open_alarms, read_alarms
from tasks.watch import alarms
from tasks.watch.alarms import notify
from tasks.watch.history import write_history
from tasks.watch.records import RowVerdict, Verdict, Verification
from tasks.watch.storage import read_references, read_verifications, write_reference, write_verification
from tests.tasks.watch.conftest import reference
from tests.webhook import webhook_receiver

FIRST_NIGHT = datetime(2026, 11, 25, 2, tzinfo=UTC)
DRIFT, SAME, FAILED, GONE = Verdict.DRIFTED, Verdict.IDENTICAL, Verdict.FAILED, Verdict.VANISHED


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/none.db")
    write_reference(project, reference("synthetic", "a", "b", "c", "softmax", "sgsl"))
    return project


@pytest.fixture
def received() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Address of an HTTP server, and what was posted to it."""
    with webhook_receiver() as server:
        yield server


def night(number: int, **verdicts: Verdict) -> Verification:
    """Return the verification of a night; each row has two seeds."""
    changed = ("torch 2.11.0 -> 2.14.1",)
    rows = [
        RowVerdict(row=row, seed=seed, verdict=verdict, reason="recall@1 0.30 is below its band", changed=changed)
        for row, verdict in verdicts.items()
        for seed in (0, 1)
    ]
    started = FIRST_NIGHT + timedelta(days=number)
    return Verification(name="synthetic", started_at=started, seconds=60, commit="c" * 40, rows=tuple(rows))


def test_a_damaged_file_is_named_with_what_to_do_and_the_next_verification_keeps_it(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    notify(project, night(0, softmax=DRIFT))
    path = project.state / "alarms.json"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StoreError, match=r"alarms\.json: damaged; move it away, then dml verify raises its alarms again$"):
        open_alarms(project.state)
    finding = doctor._alarms(project)
    assert (finding.result, finding.remedy) == (f"{path}: damaged", "move it away, then dml verify raises its alarms again")
    assert [alarm.row for alarm in notify(project, night(1, softmax=DRIFT))] == ["softmax"]
    assert "kept as alarms.json.damaged-1" in caplog.text


def page(project: Project, verification: Verification) -> str:
    """Return the page after one more verification."""
    write_verification(project.state, verification)
    write_history(project, read_references(project))
    return (project.root / SITE / HISTORY).read_text()


def causes(project: Project) -> list[str]:
    return [alarm.cause for alarm in open_alarms(project.state)]


def test_a_cause_is_one_alarm_until_its_row_is_reproduced(project: Project) -> None:
    assert notify(project, night(0, softmax=SAME, sgsl=SAME)) == []
    (alarm,) = notify(project, night(1, softmax=DRIFT, sgsl=SAME))
    assert "recall@1 0.30 is below its band" in alarm.text
    assert "torch 2.11.0 -> 2.14.1" in alarm.text
    assert "dml accept synthetic" in alarm.remedy
    again = notify(project, night(2, softmax=DRIFT))
    assert [(entry.cause, entry.since) for entry in again] == [(alarm.cause, alarm.since)]
    assert notify(project, night(3, sgsl=SAME)) == again, "a row that was not verified keeps its alarm"
    assert notify(project, night(4, softmax=SAME)) == []
    assert read_alarms(project.state) == {}


def test_each_kind_of_cause_has_its_alarm(project: Project) -> None:
    notify(project, night(0, a=DRIFT, b=FAILED, c=GONE))
    assert causes(project) == ["synthetic a drifted", "synthetic b failed", "synthetic c vanished"]
    notify(project, night(1, a=FAILED, b=DRIFT, c=GONE))
    assert causes(project) == ["synthetic a drifted", "synthetic c vanished", "synthetic a failed", "synthetic b drifted"]
    notify(project, night(2, a=SAME, b=Verdict.WITHIN_BAND, c=Verdict.NEW))
    assert causes(project) == []


def test_another_table_ends_no_alarm(project: Project) -> None:
    notify(project, night(0, a=DRIFT))
    notify(project, night(1, a=SAME).model_copy(update={"name": "softtriple/table1"}))
    assert causes(project) == ["synthetic a drifted"]


def test_the_alarm_of_a_vanished_row_ends_when_it_is_accepted_without_it(project: Project) -> None:
    (alarm,) = notify(project, night(0, a=GONE, b=SAME))
    assert alarm.remedy.startswith("restore the row, or accept synthetic without it: dml accept synthetic --why ...")
    assert causes(project) == ["synthetic a vanished"]
    assert "NOT reproduced" in page(project, night(0, a=GONE, b=SAME))
    write_reference(project, reference("synthetic", "b"))
    assert notify(project, night(1, b=SAME)) == []
    after = page(project, night(1, b=SAME))
    assert "NOT reproduced" not in after
    assert "reproduced on 2026-11-26" in after


@pytest.mark.parametrize("verdict", [DRIFT, FAILED, GONE])
def test_the_alarms_of_a_name_end_when_its_reference_is_removed(
    verdict: Verdict, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset that the project has no more is never verified again: another verification ends its alarms."""
    gone = night(0, old=verdict).model_copy(update={"name": "old"})
    path = write_reference(project, reference("old", "old"))
    notify(project, gone, night(0, a=SAME))
    notify(project, night(1, a=SAME))
    assert causes(project) == [f"old old {verdict}"]
    path.unlink()
    marked: dict[str, list[str]] = {}
    monkeypatch.setattr(alarms, "mark_comparisons", lambda uri, state, name, texts: marked.update({name: texts}))
    (project.root / "none.db").touch()
    assert notify(project, night(2, a=SAME)) == []
    assert marked == {"synthetic": [], "old": []}, "the comparisons in MLflow whose marks are removed"


def test_a_failed_row_without_a_reference_has_an_alarm_until_it_is_verified(project: Project) -> None:
    first = night(0, new=FAILED).model_copy(update={"name": "new"})
    assert [alarm.cause for alarm in notify(project, first, night(0, a=SAME))] == ["new new failed"]
    assert notify(project, night(1, new=Verdict.NEW).model_copy(update={"name": "new"})) == []


@pytest.mark.parametrize(
    ("name", "row"), [("synthetic", "synthetic/sgsl"), ("sgsl/table1", "sgsl/table1:softmax as_released best_validation:cub200")]
)
def test_an_alarm_of_any_row_ends_and_its_remedy_is_a_command(name: str, row: str, project: Project) -> None:
    nights = [night(number, **{row: verdict}).model_copy(update={"name": name}) for number, verdict in enumerate((FAILED, DRIFT, SAME))]
    (alarm,) = notify(project, nights[0])
    words = shlex.split(alarm.remedy.partition("then: ")[2])
    assert words == ["dml", "verify", name, "--row", row]
    (alarm,) = notify(project, nights[1])
    assert (alarm.name, alarm.row) == (name, row)
    assert notify(project, nights[2]) == []


def test_a_server_with_a_password_takes_the_events(
    project: Project, received: tuple[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, posted = received
    monkeypatch.setenv("PREFECT_API_URL", address)
    notify(project, night(0, a=DRIFT))
    assert [alarm.event is None for alarm in read_alarms(project.state).values()] == [False], "refused, and sent again later"
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "user:password")
    notify(project, night(1, a=DRIFT))
    assert [alarm.event is None for alarm in read_alarms(project.state).values()] == [True]
    assert [[event["event"] for event in events] for events in posted] == [["dml.verified", "dml.alarm"]]


def test_only_verifications_of_the_wanted_names_are_read(project: Project) -> None:
    """Years of nights are many files."""
    table = night(1, a=SAME).model_copy(update={"name": "softtriple/table1"})
    for one in (night(0, a=SAME), table):
        write_verification(project.state, one)
    (unreadable,) = (project.state / "verifications").glob("*-synthetic.json")
    unreadable.write_text("{")
    assert read_verifications(project.state, ["softtriple/table1"]) == [table]
    assert unreadable.exists(), "it was not read, and therefore not set aside"
    assert read_verifications(project.state) == [table]
    assert not unreadable.exists()


def test_a_name_that_is_not_accepted_is_not_missed(
    project: Project, received: tuple[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, posted = received
    monkeypatch.setenv("PREFECT_API_URL", address)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "user:password")
    notify(project, night(0, a=SAME), night(0, b=Verdict.NEW).model_copy(update={"name": "other"}))
    notify(project, night(1, b=Verdict.NEW).model_copy(update={"name": "other"}))
    notify(project, night(2, e=Verdict.NEW), night(2).model_copy(update={"name": "other"}))
    ((event,),) = posted
    assert (event["event"], event["payload"]["name"]) == ("dml.verified", "synthetic"), "of the night in which a row was compared"


def test_one_seed_that_drifts_keeps_the_alarm(project: Project) -> None:
    notify(project, night(0, a=DRIFT))
    rows = night(1, a=SAME).rows
    mixed = night(1, a=SAME).model_copy(update={"rows": (rows[0], rows[1].model_copy(update={"verdict": DRIFT}))})
    notify(project, mixed)
    assert causes(project) == ["synthetic a drifted"]


class Sent:
    """Replaces the sending: records event ids, or fails as an unreachable server or a killed process does."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.fault: BaseException | None = None

    def __call__(self, server: str, events: list[dict[str, Any]]) -> bool:
        of_alarms = [event for event in events if event["event"] != "dml.verified"]
        self.events += [(event["event"], event["id"]) for event in of_alarms]
        self.texts += [event["payload"]["text"] for event in of_alarms]
        if self.fault is not None:
            raise self.fault
        return True


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, project: Project) -> Sent:
    made = Sent()
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(alarms, "_send", made)
    return made


def test_an_event_is_sent_once_and_its_recovery_once(project: Project, sent: Sent) -> None:
    for number, verdict in enumerate((DRIFT, DRIFT, SAME, SAME, DRIFT)):
        notify(project, night(number, a=verdict))
    assert [event for event, _ in sent.events] == ["dml.alarm", "dml.recovered", "dml.alarm"]
    assert len({identity for _, identity in sent.events}) == 3


@pytest.mark.parametrize("verdict", [FAILED, GONE])
def test_no_message_says_that_drift_is_over_before_the_row_is_reproduced(verdict: Verdict, project: Project, sent: Sent) -> None:
    for number, each in enumerate((DRIFT, verdict, SAME)):
        notify(project, night(number, a=each))
    drifted, other, *recovered = sent.texts
    assert drifted.startswith("a, seed 0: drifted: ")
    assert other.startswith(f"a, seed 0: {verdict}: ")
    assert recovered == ["recovered: synthetic a drifted", f"recovered: synthetic a {verdict}"]


def test_a_process_killed_while_it_sends_repeats_the_same_event(project: Project, sent: Sent) -> None:
    sent.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        notify(project, night(0, a=DRIFT))
    sent.fault = None
    notify(project, night(1, a=DRIFT))
    notify(project, night(2, a=DRIFT))
    assert len(sent.events) == 2
    assert sent.events[0] == sent.events[1], "the server acts once on an id"


def test_an_unreachable_server_gets_the_event_later(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # nothing listens there
    assert len(notify(project, night(0, a=DRIFT))) == 1
    assert [alarm.event is None for alarm in read_alarms(project.state).values()] == [False]
    assert "did not take the events of this verification (ConnectionError); the next one sends those of alarms" in caplog.text


def test_processes_at_once_send_one_event(project: Project, sent: Sent) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: notify(project, night(0, a=DRIFT)), range(8)))
    assert len(sent.events) == 1


def test_the_index_has_a_banner_while_an_alarm_lasts(project: Project) -> None:
    folder = project.root / SITE
    folder.mkdir(parents=True)
    notify(project, night(0, a=SAME))
    assert INDEX not in (folder / HISTORY).read_text(), "no link to a page that was not written"
    (folder / INDEX).write_text(before := index_page(folder))
    notify(project, night(1, a=DRIFT))
    assert f'href="{INDEX}"' in (folder / HISTORY).read_text()
    page = (folder / INDEX).read_text()
    assert "Not reproduced: 1 alarm<" in page
    assert "recall@1 0.30 is below its band" in page
    notify(project, night(2, a=SAME))
    assert (folder / INDEX).read_text() == before


def test_doctor_reports_alarms_and_a_night_that_did_not_happen(project: Project) -> None:
    def finding() -> tuple[str, str]:
        found = doctor._alarms(project)
        return found.status, found.result

    now, none_yet = datetime.now(UTC), ("ok", "no verification of accepted results yet")
    assert finding() == none_yet
    other = night(0, a=SAME).model_copy(update={"name": "not-accepted", "started_at": now - timedelta(hours=40)})
    write_verification(project.state, other)
    assert finding() == none_yet, "nobody promised to verify it again"
    for hours in (30, 54, -9000):  # the last one while the clock was wrong
        write_verification(project.state, night(0, a=SAME).model_copy(update={"started_at": now - timedelta(hours=hours)}))
    nothing_trained = night(0).model_copy(update={"started_at": now, "skipped": ("a",)})
    write_verification(project.state, nothing_trained)
    assert finding() == ("note", "the last one with a verdict began 30 hours ago"), "as on a cluster that has no room all night"
    write_verification(project.state, night(0, a=SAME).model_copy(update={"started_at": now}))
    assert finding()[0] == "ok"
    notify(project, night(0, a=DRIFT))
    assert finding()[0] == "note"
    assert "below its band" in finding()[1]
    (project.state / "alarms.json").write_text("{")
    assert finding()[0] == "wrong"


def test_mlflow_that_cannot_be_used_stops_no_alarm(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    (project.root / "none.db").write_text("not a database")
    assert len(notify(project, night(0, a=DRIFT))) == 1
    assert "cannot be used" in caplog.text
