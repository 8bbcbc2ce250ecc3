"""Nights of the stack's schedule: a quiet one, one that drifts, its alarm, the fix, and one that is killed and caught up.

The tests run in order on one stack; each continues from the one before.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Project
from tests.e2e.stacks import in_postgres, project_with_stack, stack_up, told
from tests.e2e.test_stack import AHEAD, ENDS, FLOW, deployment_of, history, kill, run_of, runs_of, schedule_soon
from tests.webhook import webhook_receiver

pytestmark = [pytest.mark.slow, pytest.mark.proof]
SCHEDULES = "dml_core/training/optimisation/schedules.py"
FAULT = "\n\n_right = learning_rate_factor\n\n\ndef learning_rate_factor(*a):\n    return 0.5 * _right(*a)\n"


@pytest.fixture(scope="module")
def posted() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Address of an HTTP server that receives the webhook's messages, and the messages."""
    with webhook_receiver() as server:
        yield server


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, posted: tuple[str, list[dict[str, str]]]) -> Iterator[Project]:
    """A project with a stack and an accepted row."""
    project = project_with_stack(tmp_path_factory.mktemp("nights") / "project", ("softtriple",))
    project.change(scale={"num_workers": 1})
    project.git("config", "user.name", "t")
    project.git("config", "user.email", "t@example.invalid")
    project.commit("one worker")
    project.environment["DML_WEBHOOK"] = posted[0]
    with stack_up(project):
        for name in ("dataset-change", "nightly", "weekly", "weekly-all", "nightly-share"):
            schedule_soon(project, name, seconds=10**6)  # the tests start each night
        server = told(project)["PREFECT_API_URL"]
        project.run("dml", "reproduce", "--dataset", "synthetic", PREFECT_API_URL=server)
        project.commit("results")
        project.run("dml", "verify", "synthetic", PREFECT_API_URL=server)
        project.run("dml", "accept", "synthetic", "--why", "first results")
        project.commit("accept")
        yield project


def night(project: Project) -> dict[str, Any]:
    """Let the schedule of the nightly share fire soon, and return its flow run when it has ended."""
    known = runs_of(project, str(deployment_of(project, "nightly-share")["id"]))
    deployment = schedule_soon(project, "nightly-share", {"request": {"budget_minutes": 30}})
    run = run_of(project, deployment, known, *ENDS)
    assert run["auto_scheduled"]
    return run


def page(project: Project) -> str:
    return (project.root / "results/site/verification.html").read_text()


def events(posted: tuple[str, list[dict[str, str]]], number: int) -> list[str]:
    """Wait for a number of messages, and a little longer; return their events."""
    until = time.monotonic() + 120
    while len(posted[1]) < number and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(5)
    return [message["event"] for message in posted[1]]


def test_a_quiet_night_completes_and_sends_nothing(watched: Project, posted: tuple[str, list[dict[str, str]]]) -> None:
    run = night(watched)
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert events(posted, 0) == []
    assert "reproduced on" in page(watched)


def test_two_nights_that_drift_are_one_alarm_and_the_fix_ends_it(watched: Project, posted: tuple[str, list[dict[str, str]]]) -> None:
    path = watched.root / SCHEDULES
    path.write_text(path.read_text() + FAULT)
    watched.commit("halve the rate")
    for _ in range(2):
        run = night(watched)
        assert run["state"]["type"] == "FAILED", run["state"]["message"]
        assert "NOT reproduced" in run["state"]["message"]
        assert events(posted, 1) == ["dml.alarm"]
    assert "NOT reproduced since" in page(watched)
    watched.git("revert", "--no-edit", "HEAD")
    assert night(watched)["state"]["type"] == "COMPLETED"
    assert events(posted, 2) == ["dml.alarm", "dml.recovered"]
    assert "NOT reproduced since" not in page(watched)


def test_a_killed_night_is_marked_and_caught_up(watched: Project, posted: tuple[str, list[dict[str, str]]]) -> None:
    known = runs_of(watched, str(deployment_of(watched, "nightly-share")["id"]))
    deployment = schedule_soon(watched, "nightly-share", {"request": {"budget_minutes": 30}}, AHEAD)
    run = run_of(watched, deployment, known, "RUNNING", *ENDS)
    alive = f"SELECT count(*) FROM events WHERE event = 'prefect.flow-run.heartbeat' AND resource_id = 'prefect.flow-run.{run['id']}'"
    until = time.monotonic() + 400
    while in_postgres(watched, "prefect", alive) == [(0,)] and time.monotonic() < until:
        time.sleep(0.2)
    (copy,) = [path for path in (watched.root / "state/verify").iterdir() if path.is_dir()]
    kill(watched, FLOW)
    ended = run_of(watched, deployment, {*known} - {run["id"]}, "COMPLETED", "FAILED")
    assert ended["id"] == run["id"], "the same flow run is retried"
    states = [state["type"] for state in history(watched, run)]
    assert "CRASHED" in states
    assert ended["state"]["type"] == "COMPLETED", ended["state"]["message"]
    assert not copy.exists(), "the next verification removes what the killed one left"
    assert events(posted, 2) == ["dml.alarm", "dml.recovered"]
    assert "without alarms" in watched.run("dml", "doctor", PREFECT_API_URL=told(watched)["PREFECT_API_URL"])


def test_a_month_of_nights_raises_no_alarm(watched: Project, posted: tuple[str, list[dict[str, str]]]) -> None:
    before = len(list((watched.root / "state/verifications").glob("*.json")))
    sent = events(posted, 0)
    for _ in range(30):
        run = night(watched)
        assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert len(list((watched.root / "state/verifications").glob("*.json"))) == before + 30
    assert events(posted, len(sent)) == sent
    assert "without alarms" in watched.run("dml", "doctor", PREFECT_API_URL=told(watched)["PREFECT_API_URL"])
