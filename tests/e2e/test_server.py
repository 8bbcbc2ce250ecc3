"""With a Prefect server: the deployments of infra/prefect.yaml, a run that a worker takes from its pool, a scheduled run, and alarms.

The tests run in order on one server, with one worker that executes one run at a time.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from mlflow import MlflowClient

from flows.local_database import copy_empty_database
from flows.request import Request
from tasks import environment
from tasks.stack.automations import replace_automations
from tasks.stack.prefect_api import prefect_session
from tasks.watch.alarms import notify
from tasks.watch.records import Verdict
from tasks.watch.storage import write_reference
from tests.e2e.conftest import ROOT, Project, make_project
from tests.tasks.watch.conftest import reference
from tests.tasks.watch.test_alarms import night
from tests.webhook import webhook_receiver

pytestmark = pytest.mark.slow


@dataclass
class Server:
    """A Prefect server on this machine, and a project deployed to it."""

    url: str
    environment: dict[str, str]
    project: Project
    worker_log: Path
    worker: psutil.Popen | None = None

    def start_worker(self) -> None:
        """Deploy infra/prefect.yaml, and start a worker that executes the runs of its pool one at a time."""
        self.ask("work_pools/", name="dml", type="process")
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(Path("infra") / "prefect.yaml")]
        deployed = subprocess.run(command, cwd=self.project.root, env=self.environment, capture_output=True, text=True, check=False)
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        self.ask(f"deployments/{self.deployment('dataset-change')['id']}/pause_deployment")  # it fires every 15 minutes
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "dml", "--limit", "1"]
        with self.worker_log.open("w") as log:
            self.worker = psutil.Popen(command, cwd=self.project.root, env=self.environment, stdout=log, stderr=subprocess.STDOUT)

    def stop_worker(self) -> None:
        """Kill the worker, with any run that it has taken: on SIGTERM it would wait for that run."""
        if self.worker is not None:
            for process in (*self.worker.children(recursive=True), self.worker):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.worker.wait()
            self.worker = None

    def ask(self, path: str, method: str = "POST", **body: object) -> Any:
        answer = prefect_session().request(method, f"{self.url}/{path}", json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def deployment(self, name: str) -> dict:
        return self.ask(f"deployments/name/reproduce/{name}", method="GET")

    def finished(self, deployment: str) -> dict:
        """Wait for a finished run of the deployment, and return the first."""
        deadline = time.monotonic() + 900
        terminal = {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}
        while time.monotonic() < deadline:
            chosen = {"deployments": {"name": {"any_": [deployment]}}, "flow_runs": {"state": {"type": terminal}}}
            found = self.ask("flow_runs/filter", **chosen, sort="START_TIME_ASC")
            if found:
                return found[0]
            time.sleep(1)
        raise AssertionError(f"no run of {deployment} has ended; the worker said: {self.worker_log.read_text()[-3000:]}")

    def logged(self, flow_run: dict) -> str:
        """Return the log lines of a run on the server."""
        chosen = {"flow_run_id": {"any_": [flow_run["id"]]}}
        return "\n".join(line["message"] for line in self.ask("logs/filter", logs=chosen, limit=200))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    project = make_project(folder / "project", ("untrained",))
    project.change(scale={"num_workers": 1})
    shutil.copytree(ROOT / "infra", project.root / "infra")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    for name in ("prefect", "home"):
        (folder / name).mkdir()
    copy_empty_database(folder / "prefect")
    environment = project.environment | {  # of deployment and worker, whose user has no folder of Prefect yet
        "HOME": str(folder / "home"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "3",
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "3",
        "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.5",
        "DML_ROOT": str(project.root),
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = (folder / "server.log").open("w")
    of_server = environment | {"PREFECT_HOME": str(folder / "prefect")}
    process = subprocess.Popen(command, env=of_server, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    server = None
    try:
        wait_for(f"{url}/health")
        server = Server(url, environment, project, folder / "worker.log")
        server.start_worker()
        yield server
    finally:
        if server is not None:
            server.stop_worker()
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)
        log.close()


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 600
    while True:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.5)


def test_the_forms_have_the_project_s_datasets_and_variants_as_choices(server: Server) -> None:
    deployments = {entry["name"]: entry for entry in server.ask("deployments/filter")}
    assert set(deployments) == {"nightly", "dataset-change", "nightly-share", "on-demand", "single-run", "table", "weekly", "weekly-all"}
    assert [entry["schedule"]["cron"] for entry in deployments["nightly"]["schedules"]] == ["0 2 * * *"]
    for name in ("on-demand", "nightly", "dataset-change", "table", "weekly"):
        form = deployments[name]["parameter_openapi_schema"]["definitions"]["Request"]["properties"]
        assert set(form) == {field.name for field in fields(Request)}
        assert form["force"]["type"] == "boolean"
        assert form["variants"]["items"]["enum"] == ["untrained"]
        assert {"synthetic", "fashion-mnist", "cub200"} <= set(form["datasets"]["items"]["enum"])
        assert {"*", "sgsl/figure3"} <= set(form["tables"]["items"]["enum"])
    single = deployments["single-run"]["parameter_openapi_schema"]["properties"]
    assert single["dataset"]["enum"] == ["synthetic", "fashion-mnist"]
    assert [entry["schedule"]["cron"] for entry in deployments["weekly"]["schedules"]] == ["0 3 * * 6"]
    assert deployments["weekly"]["parameters"]["request"]["prepared_only"]
    for name, misspelt in (
        ("single-run", {"dataset": "synthetic", "variant": "softriple"}),
        ("on-demand", {"request": {"variants": ["softriple"]}}),
    ):
        with pytest.raises(requests.HTTPError) as refused:
            server.ask(f"deployments/{deployments[name]['id']}/create_flow_run", parameters=misspelt)
        assert "softriple" in refused.value.response.text


@pytest.mark.proof
def test_a_worker_runs_a_deployed_flow(server: Server) -> None:
    # Changes only the scores: the scheduled run below reuses the network and its embeddings, and computes its own scores.
    parameters = {"dataset": "synthetic", "variant": "untrained", "seed": 0, "overrides": ["evaluation.recall_at=[1]"]}
    (single,) = (entry for entry in server.ask("deployments/filter") if entry["name"] == "single-run")
    server.ask(f"deployments/{single['id']}/create_flow_run", parameters=parameters)
    run = server.finished("single-run")
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert run["name"] == "synthetic / untrained / seed 0"
    assert list((server.project.root / "state/store/evaluate").glob("*/metrics.json"))
    names = {task["name"] for task in server.ask("task_runs/filter", flow_runs={"id": {"any_": [run["id"]]}})}
    assert names == {"prepare synthetic", *(f"{step} untrained s0" for step in ("train", "embed", "evaluate", "publish"))}


@pytest.mark.proof
def test_a_run_s_page_has_its_log_lines_its_scores_and_where_things_are(server: Server) -> None:
    run = server.finished("single-run")
    logged = server.logged(run)
    assert "synthetic / untrained / seed 0: recall@1 0." in logged
    assert "state/store/train/" in logged
    (page,) = server.ask("artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}})
    assert "| recall@1 | 0." in page["data"]
    assert "state/store/evaluate/" in page["data"]


def test_a_scheduled_run_comes_and_mlflow_has_it(server: Server) -> None:
    in_five_seconds = {"interval": 86400, "anchor_date": (datetime.now(UTC) + timedelta(seconds=5)).isoformat()}
    path = f"deployments/{server.deployment('nightly')['id']}"
    server.ask(path, method="PATCH", schedules=[{"active": True, "schedule": in_five_seconds}])
    run = server.finished("nightly")
    server.stop_worker()
    assert run["auto_scheduled"], "the scheduler made this run, nobody else"
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert run["name"] == "comparison on synthetic, all variants and seeds"
    assert (server.project.root / "results/synthetic/report.md").is_file()
    client = MlflowClient(f"sqlite:///{server.project.root / 'state/mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, "params.variant = 'untrained' and params.seed = '0'")
    assert [entry for entry in found if "recall_at_8" in entry.data.metrics], "the scheduled run's scores"
    state = server.project.root / "state"
    steps = {step.name for name in ("train", "embed", "evaluate") for step in (state / "store" / name).iterdir()}
    assert {record.name for record in (state / "prefect/storage").iterdir()} == steps, "the next flow finds them finished"
    limits = {entry["name"]: entry["limit"] for entry in server.ask("v2/concurrency_limits/filter")}
    assert limits["dml-workers"] == 1, "the run found or made the limit, which it cannot pass over"


@pytest.mark.proof
def test_a_limit_below_what_a_run_takes_is_said_at_once(server: Server) -> None:
    command = ("dml", "run", "synthetic", "untrained", "--set", "scale.num_workers=2")
    printed = server.project.run(*command, code=2, **server.environment)
    assert "Prefect's limit 'dml-workers' is 1, but a run needs 2 workers" in printed


def test_the_webhook_gets_one_alarm_one_recovery_and_one_message_of_a_missed_night(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project = environment.Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/none.db")
    write_reference(project, reference("synthetic", "a"))
    monkeypatch.setenv("PREFECT_API_URL", server.url)
    committed, automations = (ROOT / "infra/automations.yaml").read_text(), tmp_path / "automations.yaml"
    assert committed.count("within: 93600 ") == 1
    automations.write_text(committed.replace("within: 93600 ", "within: 20 "))  # seconds; a night and two hours otherwise
    with webhook_receiver() as (address, posted):

        def wait_for_posts(number: int) -> None:
            until = time.monotonic() + 120
            while len(posted) < number and time.monotonic() < until:
                time.sleep(0.2)

        monkeypatch.setenv("DML_WEBHOOK", address)
        for _ in range(2):  # twice, as `dml stack up` does after a restart
            replace_automations(server.url, automations)
        for number, verdict in enumerate((Verdict.IDENTICAL, Verdict.DRIFTED, Verdict.DRIFTED)):
            notify(project, night(number, a=verdict))
        wait_for_posts(1)
        notify(project, night(3, a=Verdict.IDENTICAL))
        wait_for_posts(3)
        time.sleep(3)  # for a message that must not come
    assert [entry["event"] for entry in posted] == ["dml.alarm", "dml.recovered", "dml.missed"]
    assert posted[2]["text"] == "no verification of synthetic for 26 hours"
    assert "recall@1 0.30 is below its band" in posted[0]["text"]
    assert "dml accept synthetic" in posted[0]["remedy"]
