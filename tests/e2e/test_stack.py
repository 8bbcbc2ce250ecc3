"""The local stack from start to stop: up, a comparison, schedules, a dataset that changes, processes that are killed, down.

The tests run in order on one stack; each continues from the one before.
"""

import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from mlflow import MlflowClient
from moto.server import ThreadedMotoServer

from tasks.stack.settings import run_folder
from tests.e2e.conftest import Project
from tests.e2e.stacks import ask, chosen, in_postgres, mlflow_runs, processes, project_with_stack, slots, stack_up, stored, told
from tests.e2e.test_tables import add_tables
from tests.faults.record import keep_stack_fact

pytestmark = [pytest.mark.slow, pytest.mark.proof]

ENDS = ("COMPLETED", "FAILED", "CRASHED")
EPOCHS = 150
SOON = 75  # seconds; the server's scheduler runs once a minute
# Prefect delays the events of a run that it creates less than five minutes before its start by a quarter of an hour, and with them the
# automation that retries a crashed run (docs/how-to/nightly-runs.md).
AHEAD = SOON + 5 * 60


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with a newly started stack, which is stopped afterwards in any case."""
    project = project_with_stack(tmp_path_factory.mktemp("stack") / "project", ("untrained", "softtriple"))
    add_tables(project, "table91")
    with stack_up(project):
        quarterly = deployment_of(project, "dataset-change")  # must not run between the other deployments
        for schedule in quarterly["schedules"]:
            ask(project, f"deployments/{quarterly['id']}/schedules/{schedule['id']}", method="DELETE")
        yield project


def test_it_is_up_on_the_loopback_alone_and_a_second_up_changes_nothing(stacked: Project) -> None:
    before = {process.pid for process in processes(stacked)}
    assert len(before) >= 8
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")  # IPv4 on a dual-stack socket
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
    for secret in (*chosen(stacked)["secrets"].values(), chosen(stacked)["s3"]["user"]):
        assert secret not in again + services + doctor


@pytest.mark.parametrize("origin", [{}, {"Origin": "https://evil.example", "Host": "evil.example"}])
def test_its_servers_refuse_what_a_web_page_may_send(stacked: Project, origin: dict[str, str]) -> None:
    """Any page in a browser on this machine can send requests to it, and with an untyped body it need not ask the server before."""
    api, s3 = told(stacked)["PREFECT_API_URL"], told(stacked)["AWS_ENDPOINT_URL"]
    for path in ("deployments/filter", "flows/", "admin/version"):
        answer = requests.post(f"{api}/{path}", data=b"{}", headers=origin, timeout=60)
        assert (answer.status_code, answer.json()) == (401, {"exception_message": "Unauthorized"})
    for method, path in (("GET", "dml?list-type=2"), ("POST", "moto-api/reset")):
        answer = requests.request(method, f"{s3}/{path}", headers=origin, timeout=60)
        assert (answer.status_code, "Access-Control-Allow-Origin" in answer.headers) == (403, False)
    for printed in (stacked.run("dml", "stack", "up"), stacked.run("dml", "stack", "status")):
        assert f"PREFECT_API_AUTH_STRING in {stacked.root / 'state/stack/env'}" in printed


def test_a_comparison_runs_through_it(stacked: Project) -> None:
    printed = stacked.run("dml", "reproduce", PREFECT_API_URL=told(stacked)["PREFECT_API_URL"])
    assert "note: using the local stack" in printed
    # The run is in MLflow, and its files are in S3 under its id.
    (run,) = mlflow_runs(stacked, "params.variant = 'softtriple' and params.seed = '0'")
    assert 0 <= run.data.metrics["recall_at_1"] <= 1
    assert in_postgres(stacked, "mlflow", f"SELECT status FROM runs WHERE run_uuid = '{run.info.run_id}'") == [("FINISHED",)]
    names = stored(stacked)
    assert any(run.info.run_id in name and name.endswith("steps/train/checkpoint.pt") for name in names)
    assert any(name.startswith("store/train/") and name.endswith("checkpoint.pt") for name in names)
    # Its flow run is in the stack's Prefect database.
    (state,) = in_postgres(stacked, "prefect", "SELECT state_type FROM flow_run WHERE name LIKE 'comparison on synthetic%'")
    assert state == ("COMPLETED",)


def deployment_of(project: Project, name: str) -> dict[str, Any]:
    (found,) = [entry for entry in ask(project, "deployments/filter") if entry["name"] == name]
    return dict(found)


def schedule_soon(project: Project, name: str, parameters: dict[str, Any] | None = None, seconds: int = SOON) -> str:
    """Replace a deployment's schedules by one that fires once, in `seconds`; return the deployment's id."""
    deployment = deployment_of(project, name)
    for schedule in deployment["schedules"]:
        ask(project, f"deployments/{deployment['id']}/schedules/{schedule['id']}", method="DELETE")
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    once = {"rrule": f"DTSTART:{at:%Y%m%dT%H%M%S}\nRRULE:FREQ=DAILY;COUNT=1", "timezone": "UTC"}
    made = [{"active": True, "schedule": once, "parameters": parameters or {}}]
    ask(project, f"deployments/{deployment['id']}/schedules", made)
    return str(deployment["id"])


def runs_of(project: Project, deployment: str) -> dict[str, dict[str, Any]]:
    """Return the started runs of the deployment by id."""
    found = ask(project, "flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}})
    return {run["id"]: run for run in found if run["state"]["type"] not in ("SCHEDULED", "PENDING")}


def run_of(project: Project, deployment: str, known: Collection[str], *states: str) -> dict[str, Any]:
    """Wait for a run of the deployment that is not in `known` and is in one of these states, and return it."""
    until = time.monotonic() + 900
    while time.monotonic() < until:
        with suppress(OSError):  # the server may be restarting
            for name, run in runs_of(project, deployment).items():
                if name not in known and run["state"]["type"] in states:
                    return run
        time.sleep(1)
    worker = (project.root / "state/stack/prefect-worker/log").read_text()
    raise AssertionError(f"no run of the deployment is {' or '.join(states)}; {worker[-5000:]}")


def history(project: Project, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of a flow run, oldest first."""
    states = ask(project, f"flow_run_states/?flow_run_id={run['id']}", method="GET")
    return sorted(states, key=lambda state: str(state["timestamp"]))


def test_the_schedule_fires_and_mlflow_has_the_report(stacked: Project) -> None:
    deployment = schedule_soon(stacked, "nightly")
    run = run_of(stacked, deployment, (), *ENDS)
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert run["auto_scheduled"], "the scheduler made this run, nobody else"
    (parent,) = mlflow_runs(stacked, "attributes.run_name = 'comparison on synthetic'")
    assert any(parent.info.run_id in name and name.endswith("artifacts/report.md") for name in stored(stacked))


def test_the_weekly_schedule_fires_and_mlflow_has_the_tables_page(stacked: Project) -> None:
    stacked.run("dml", "data", "prepare", "cub200")
    requested = {"tables": ["softtriple/table91"], "prepared_only": True, "seeds": [0, 1, 2, 3, 4]}
    deployment = schedule_soon(stacked, "weekly", {"request": requested})
    run = run_of(stacked, deployment, (), *ENDS)
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert run["auto_scheduled"]
    assert run["parameters"] == {"request": requested}
    trained = [found for found in mlflow_runs(stacked) if found.data.tags.get("mlflow.runName", "").startswith("cub200 / ")]
    assert len(trained) == 10, "two rows with five seeds"
    assert any(name.endswith("table91.html") for name in stored(stacked)), "the page is with the table's parent run"


def test_a_changed_dataset_is_noticed_and_compared_anew(stacked: Project) -> None:
    before = {run.info.run_id for run in mlflow_runs(stacked, "params.variant = 'softtriple'")}
    assert len(before) == 1
    deployment = schedule_soon(stacked, "dataset-change")
    run = run_of(stacked, deployment, (), *ENDS)
    assert (run["state"]["type"], run["name"]) == ("COMPLETED", "changed datasets among synthetic")
    assert ask(stacked, "task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}}) == [], "nothing had changed"
    raw = stacked.root / "data/raw/synthetic"
    one, other = sorted(path for path in raw.rglob("*") if path.suffix in (".png", ".jpg"))[:2]
    shutil.copy(other, one)
    schedule_soon(stacked, "dataset-change")
    run = run_of(stacked, deployment, {run["id"]}, *ENDS)
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert run["auto_scheduled"]
    tasks = {task["name"] for task in ask(stacked, "task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})}
    assert {"prepare synthetic", "train softtriple s0", "publish softtriple s0"} <= tasks
    (now,) = mlflow_runs(stacked, "params.variant = 'softtriple'")
    assert now.info.run_id not in before, "a run on the dataset as it is now, in the place of the one before"


def kill(project: Project, *parts: str) -> None:
    """Kill the stack's processes whose command contains one of `parts`, with SIGKILL; each part must match at least one."""
    found = [(part, process) for process in processes(project) for part in parts if part in " ".join(process.cmdline())]
    assert {part for part, _ in found} == set(parts)
    for _, process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()


WORKER, FLOW, SERVER = "worker start --pool dml", "-m prefect.engine", "prefect server start"
DATABASE, MLFLOW = "postgres -D", "mlflow server"


def in_the_middle(project: Project, num_epochs: int, seconds: int = SOON) -> tuple[str, dict[str, Any]]:
    """Start a nightly run; return it, once it has a checkpoint and the server its heartbeat, with its deployment's id."""
    before = {name for name in stored(project) if name.endswith("checkpoint.pt")}
    project.change(comparison={"protocol": {"num_epochs": num_epochs}})  # requires training that lasts until the kill
    known = runs_of(project, deployment_of(project, "nightly")["id"])
    deployment = schedule_soon(project, "nightly", seconds=seconds)
    run = run_of(project, deployment, known, "RUNNING", *ENDS)
    alive = f"SELECT count(*) FROM events WHERE event = 'prefect.flow-run.heartbeat' AND resource_id = 'prefect.flow-run.{run['id']}'"
    until = time.monotonic() + 400
    while time.monotonic() < until:
        checkpoints = {name for name in stored(project) if name.startswith("store/train/") and name.endswith("checkpoint.pt")}
        if checkpoints - before and in_postgres(project, "prefect", alive) != [(0,)] and "dml-workers" in slots(project):
            assert runs_of(project, deployment)[run["id"]]["state"]["type"] == "RUNNING"
            return deployment, run
        time.sleep(0.5)
    raise AssertionError("the run leaves no checkpoint, or sends no heartbeat")


def scores(project: Project) -> dict[str, float]:
    """Return the final scores in MLflow of the only run with the current settings."""
    (run,) = mlflow_runs(project, "params.variant = 'softtriple'")
    assert run.info.status == "FINISHED"
    return {name: value for name, value in run.data.metrics.items() if name in ("recall_at_1", "map_at_r", "r_precision", "nmi")}


def has_what_an_undisturbed_run_has(project: Project, before: Collection[str]) -> None:
    """Assert that the one network not in `before`, and all scores, have the bytes of the same run repeated from its initial weights."""
    assert len(scores(project)) == 4
    now = stored(project)
    (network,) = [name for name in now if name.endswith("checkpoint.pt") and name not in before and name.startswith("store/train/")]
    left = {name: etag for name, etag in now.items() if name == network or name.endswith("metrics.json")}
    project.run("dml", "run", "synthetic", "softtriple", "--force", PREFECT_API_URL=told(project)["PREFECT_API_URL"])
    again = stored(project)
    assert {name: again[name] for name in left} == left


def end_of(project: Project, deployment: str, run: dict[str, Any], killed: datetime) -> tuple[dict[str, Any], list[dict[str, Any]], float]:
    """Wait for the end of an interrupted run; return the run, its states, and the seconds from the kill to its end."""
    finished = run_of(project, deployment, set(runs_of_when_back(project, deployment)) - {run["id"]}, "COMPLETED", "FAILED")
    seconds = (datetime.now(UTC) - killed).total_seconds()
    states = history(project, run)
    print("\n".join(f"{state['timestamp']} {state['name']}: {state['message']}" for state in states), f"\nkilled at {killed}")
    assert finished["state"]["type"] == "COMPLETED", finished["state"]["message"]
    return finished, states, seconds


def all_are_up(project: Project) -> None:
    """Wait until supervisor has restarted what was killed: a run may end before."""
    until = time.monotonic() + 300
    while (printed := project.start("dml", "stack", "status").communicate()[0]).count(" up ") < 8:
        assert time.monotonic() < until, printed
        time.sleep(1)


def test_a_run_whose_worker_and_process_are_killed_is_marked_and_taken_up_again(stacked: Project) -> None:
    before = stored(stacked)
    deployment, run = in_the_middle(stacked, EPOCHS, AHEAD)
    kill(stacked, WORKER, FLOW)
    finished, states, seconds = end_of(stacked, deployment, run, killed := datetime.now(UTC))
    (crashed,) = [state for state in states if state["type"] == "CRASHED"]
    assert "no heartbeat" in crashed["message"]
    marked = datetime.fromisoformat(crashed["timestamp"]) - killed
    assert marked < timedelta(seconds=150)
    assert "AwaitingRetry" in [state["name"] for state in states]
    assert finished["run_count"] == 2
    assert slots(stacked) == {}
    has_what_an_undisturbed_run_has(stacked, before)
    keep_stack_fact(
        "Prefect's worker and the flow's process",
        f"marked as crashed after {marked.total_seconds():.0f} s, taken up again, ended after {seconds:.0f} s; same bytes",
    )


def test_a_run_goes_on_where_the_worker_and_the_server_are_killed(stacked: Project) -> None:
    before = stored(stacked)
    deployment, run = in_the_middle(stacked, EPOCHS + 1)
    kill(stacked, WORKER, SERVER)
    finished, _, seconds = end_of(stacked, deployment, run, datetime.now(UTC))
    assert finished["run_count"] == 1
    all_are_up(stacked)
    has_what_an_undisturbed_run_has(stacked, before)
    keep_stack_fact("Prefect's worker and server", f"the same process went on, ended after {seconds:.0f} s; same bytes")


def test_a_run_goes_on_where_the_database_and_mlflow_are_killed(stacked: Project) -> None:
    before = stored(stacked)
    deployment, run = in_the_middle(stacked, EPOCHS + 2)
    kill(stacked, DATABASE, MLFLOW)
    finished, _, seconds = end_of(stacked, deployment, run, datetime.now(UTC))
    all_are_up(stacked)
    has_what_an_undisturbed_run_has(stacked, before)
    how = "the same process went on" if finished["run_count"] == 1 else "taken up again by the automation"
    keep_stack_fact("PostgreSQL and MLflow", f"{how}, ended after {seconds:.0f} s; same bytes")


def runs_of_when_back(project: Project, deployment: str) -> dict[str, dict[str, Any]]:
    """Return `runs_of` as soon as supervisor has restarted the server."""
    until = time.monotonic() + 120
    while True:
        try:
            return runs_of(project, deployment)
        except OSError:
            assert time.monotonic() < until, "the server is not brought back"
            time.sleep(1)


def test_the_next_run_of_the_schedule_has_the_slot_of_one_that_died(stacked: Project) -> None:
    (retry,) = ask(stacked, "automations/filter", {"automations": {"name": {"any_": ["retry-crashed-flows"]}}})
    ask(stacked, f"automations/{retry['id']}", {"enabled": False}, method="PATCH")
    deployment, run = in_the_middle(stacked, EPOCHS + 3)
    kill(stacked, WORKER, FLOW, SERVER)  # the server does not forget the slots that the run holds
    stacked.change(comparison={"protocol": {"num_epochs": 2}})
    known = runs_of_when_back(stacked, deployment)
    schedule_soon(stacked, "nightly")  # fires while the server regards the dead run as running, and waits for its slot
    finished = run_of(stacked, deployment, known, *ENDS)
    dead = runs_of(stacked, deployment)[run["id"]]
    for each in (dead, finished):
        print("\n".join(f"{state['timestamp']} {state['name']}: {state['message']}" for state in history(stacked, each)))
    assert dead["state"]["type"] == "CRASHED"
    assert finished["auto_scheduled"]
    assert finished["state"]["type"] == "COMPLETED", finished["state"]["message"]
    until = time.monotonic() + 150
    while slots(stacked) and time.monotonic() < until:
        time.sleep(1)
    assert slots(stacked) == {}, "the dead flow's workers' slots come back when their lease ends"
    keep_stack_fact(
        "Prefect's worker and server and the flow's process, without automatic retries",
        "the next run of the schedule waited for the dead one to be marked, had its slot and ended well; no slot was left taken",
    )


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


def test_an_upgrade_keeps_the_databases_of_a_stack_with_its_user_s_s3_server(tmp_path: Path) -> None:
    project, s3 = project_with_stack(tmp_path / "project", ("softtriple",)), ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    login = {"AWS_ACCESS_KEY_ID": "team", "AWS_SECRET_ACCESS_KEY": "a secret of theirs"}
    s3.start()
    try:
        project.run("dml", "stack", "up", "--s3", "http://{}:{}".format(*s3.get_host_and_port()), **login)
        MlflowClient(told(project)["MLFLOW_TRACKING_URI"]).create_experiment("of before")
        weekly = deployment_of(project, "weekly")
        for schedule in weekly["schedules"]:
            ask(project, f"deployments/{weekly['id']}/schedules/{schedule['id']}", {"active": False}, method="PATCH")
        before = {process.pid for process in processes(project)}
        assert project.run("dml", "stack", "restart").count(": up at") == 7
        assert before.isdisjoint(process.pid for process in processes(project))
        assert MlflowClient(told(project)["MLFLOW_TRACKING_URI"]).get_experiment_by_name("of before") is not None
        (schedule,) = deployment_of(project, "weekly")["schedules"]
        assert not schedule["active"], "nothing changed, and nothing was deployed again"
        file = project.root / "infra/prefect.yaml"
        file.write_text(file.read_text().replace("- name: weekly\n    description: ", "- name: weekly\n    description: From today on. "))
        assert ": up at" not in project.run("dml", "stack", "up")
        assert deployment_of(project, "weekly")["description"].startswith("From today on. ")
    finally:
        project.run("dml", "stack", "down")
        s3.stop()
