"""The local stack from nothing to nothing: up, a comparison through it, the schedule, a worker that is killed, down.

One story in order, on one stack: each test goes on from the one before it.
"""

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import psutil
import psycopg2
import pytest
from mlflow import MlflowClient

from tasks.environment import stack_environment
from tasks.stack.life import processes_of
from tasks.stack.settings import run_folder
from tests.e2e.conftest import ROOT, Project, make_project

pytestmark = [pytest.mark.slow, pytest.mark.proof]


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project whose stack is up, from nothing; ended afterwards, whatever happened."""
    project = make_project(tmp_path_factory.mktemp("stack") / "project", ("untrained", "softtriple"))
    shutil.copytree(ROOT / "infra", project.root / "infra")
    project.commit("infra")
    try:
        project.run("dml", "stack", "up")
        yield project
    finally:
        project.run("dml", "stack", "down")


def told(project: Project) -> dict[str, str]:
    return stack_environment(project.root / "state")


def chosen(project: Project) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project.root / "state" / "stack" / "chosen.json").read_text())
    return found


def ask(project: Project, path: str, body: object = None, method: str = "POST") -> Any:
    url = f"{told(project)['PREFECT_API_URL']}/{path}"
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")


def in_postgres(project: Project, database: str, query: str) -> list[tuple[Any, ...]]:
    of = chosen(project)
    connection = psycopg2.connect(
        host="127.0.0.1", port=of["ports"]["postgres"], user="dml", password=of["secrets"]["postgres"], dbname=database
    )
    with connection, connection.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetchall()


def processes(project: Project) -> list[psutil.Process]:
    state = project.root / "state"
    return processes_of(state / "stack", run_folder(state))


def test_it_is_up_on_the_loopback_alone_and_a_second_up_changes_nothing(stacked: Project) -> None:
    before = {process.pid for process in processes(stacked)}
    assert len(before) >= 8
    listening = {
        connection.laddr.ip
        for process in processes(stacked)
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::1"}, listening
    again = stacked.run("dml", "stack", "up")
    assert ": up at" not in again, "nothing was started"
    services = stacked.run("dml", "stack", "status")
    assert services.count(" up ") == 8, services
    doctor = stacked.run("dml", "doctor")
    assert "3 nodes" in doctor
    for secret in chosen(stacked)["secrets"].values():
        assert secret not in again + services + doctor


def test_a_comparison_runs_through_it(stacked: Project) -> None:
    printed = stacked.run("dml", "reproduce", PREFECT_API_URL=told(stacked)["PREFECT_API_URL"])
    assert "note: using the local stack" in printed
    # The run is in MLflow, and its files in S3 under its id.
    client = MlflowClient(told(stacked)["MLFLOW_TRACKING_URI"])
    experiments = [found.experiment_id for found in client.search_experiments(filter_string="name LIKE 'dml-repro/%'")]
    (run,) = client.search_runs(experiments, "params.variant = 'softtriple' and params.seed = '0'")
    assert 0 <= run.data.metrics["recall_at_1"] <= 1
    assert in_postgres(stacked, "mlflow", f"SELECT status FROM runs WHERE run_uuid = '{run.info.run_id}'") == [("FINISHED",)]
    settings = told(stacked)
    bucket = boto3.client(
        "s3",
        endpoint_url=settings["AWS_ENDPOINT_URL"],
        aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )
    names = [entry["Key"] for page in bucket.get_paginator("list_objects_v2").paginate(Bucket="dml") for entry in page.get("Contents", [])]
    assert any(run.info.run_id in name and name.endswith("steps/train/checkpoint.pt") for name in names)
    assert any(name.startswith("store/train/") and name.endswith("checkpoint.pt") for name in names)
    # Its flow run is in Prefect's own database there.
    (state,) = in_postgres(stacked, "prefect", "SELECT state_type FROM flow_run WHERE name LIKE 'comparison on synthetic%'")
    assert state == ("COMPLETED",)


def schedule_soon(project: Project, seconds: float) -> str:
    """Have the nightly deployment's schedule fire so soon, once, in the place of its own; the deployment's id."""
    (nightly,) = [entry for entry in ask(project, "deployments/filter") if entry["name"] == "nightly"]
    for schedule in nightly["schedules"]:
        ask(project, f"deployments/{nightly['id']}/schedules/{schedule['id']}", method="DELETE")
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    once = {"rrule": f"DTSTART:{at:%Y%m%dT%H%M%S}\nRRULE:FREQ=DAILY;COUNT=1", "timezone": "UTC"}
    ask(project, f"deployments/{nightly['id']}/schedules", [{"active": True, "schedule": once}])
    return str(nightly["id"])


def run_of(project: Project, deployment: str, known: set[str], *states: str) -> dict[str, Any]:
    """A run of the deployment that is not among `known` and has come to one of these states, waited for."""
    until = time.monotonic() + 600
    while time.monotonic() < until:
        for run in ask(project, "flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}}):
            if run["id"] not in known and run["state"]["type"] in states:
                return dict(run)
        time.sleep(2)
    raise AssertionError(
        f"no run of the deployment is {' or '.join(states)}; {(project.root / 'state/stack/prefect-worker/log').read_text()}"
    )


def test_the_schedule_fires_and_mlflow_has_the_report(stacked: Project) -> None:
    deployment = schedule_soon(stacked, 60)
    run = run_of(stacked, deployment, set(), "COMPLETED", "FAILED", "CRASHED")
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert run["auto_scheduled"], "the scheduler made this run, nobody else"
    client = MlflowClient(told(stacked)["MLFLOW_TRACKING_URI"])
    experiments = [found.experiment_id for found in client.search_experiments(filter_string="name LIKE 'dml-repro/%'")]
    (parent,) = client.search_runs(experiments, "attributes.run_name = 'comparison on synthetic'")
    assert "report.md" in [file.path for file in client.list_artifacts(parent.info.run_id)]


def test_a_run_whose_processes_are_killed_is_marked_and_the_next_one_takes_its_slot(stacked: Project) -> None:
    stacked.change(comparison={"protocol": {"num_epochs": 400}})  # so that there is something to train, and time to kill it
    deployment = schedule_soon(stacked, 60)
    known = {run["id"] for run in ask(stacked, "flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}})}
    known -= {run["id"] for run in ask(stacked, "flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}})}
    run = run_of(stacked, deployment, known, "RUNNING")
    time.sleep(45)  # at least one heartbeat: a run that sent none is not known to have lived
    flow = [process for process in processes(stacked) if "prefect.flow_engine" in " ".join(process.cmdline())]
    worker = [process for process in processes(stacked) if "worker start --pool dml" in " ".join(process.cmdline())]
    assert flow
    assert worker
    for process in (*worker, *flow):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    stacked.change(comparison={"protocol": {"num_epochs": 2}})
    crashed = run_of(stacked, deployment, known, "CRASHED", "COMPLETED", "FAILED")
    assert (crashed["id"], crashed["state"]["type"]) == (run["id"], "CRASHED")
    assert "heartbeat" in crashed["state"]["message"]
    # supervisor has brought a worker back, and the deployment's one slot is free again.
    again = ask(stacked, f"deployments/{deployment}/create_flow_run")
    finished = run_of(stacked, deployment, known | {run["id"]}, "COMPLETED", "FAILED", "CRASHED")
    assert (finished["id"], finished["state"]["type"]) == (again["id"], "COMPLETED"), finished["state"]["message"]


def test_down_leaves_no_process_no_port_and_no_secret(stacked: Project) -> None:
    state, of = stacked.root / "state", chosen(stacked)
    stacked.run("dml", "stack", "down")
    assert processes(stacked) == []
    listening = {connection.laddr.port for connection in psutil.net_connections(kind="tcp") if connection.status == psutil.CONN_LISTEN}
    assert not listening & set(of["ports"].values())
    assert not run_folder(state).exists()
    for path in (path for path in (state / "stack").rglob("*") if path.is_file()):
        assert not any(secret in path.read_text(errors="replace") for secret in of["secrets"].values()), path
    assert "no stack of this project is up" in stacked.run("dml", "stack", "status", code=2)
