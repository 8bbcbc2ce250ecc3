"""With a Prefect server: the deployments of infra/prefect.yaml, and a run that a worker takes from its pool."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Project, make_project

pytestmark = pytest.mark.slow


@dataclass
class Server:
    """A Prefect server on this machine, and a project deployed to it."""

    url: str
    environment: dict[str, str]
    project: Project

    def prefect(self, *arguments: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            cwd=self.project.root,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def ask(self, path: str, **body: object) -> list[dict]:
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    project = make_project(folder / "project", ("untrained",))
    shutil.copytree(ROOT / "infra", project.root / "infra")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    (folder / "prefect").mkdir()
    environment = project.environment | {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DML_ROOT": str(project.root),
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(f"{url}/health")
        yield Server(url, environment, project)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)
        log.close()


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.5)


def test_a_worker_runs_a_deployed_flow(server: Server) -> None:
    server.prefect("work-pool", "create", "dml", "--type", "process")
    server.prefect("deploy", "--all", "--prefect-file", str(Path("infra") / "prefect.yaml"))
    deployments = {entry["name"]: entry for entry in server.ask("deployments/filter")}
    assert set(deployments) == {"nightly", "on-demand", "single-run"}
    assert [entry["schedule"]["cron"] for entry in deployments["nightly"]["schedules"]] == ["0 2 * * *"]
    form = deployments["on-demand"]["parameter_openapi_schema"]["properties"]
    assert set(form) == {"datasets", "variants", "seeds", "force"}
    assert form["force"]["type"] == "boolean"

    server.prefect("deployment", "run", "run/single-run", "--param", "variant=untrained", "--param", "seed=4")
    server.prefect("worker", "start", "--pool", "dml", "--run-once")
    (run,) = server.ask("flow_runs/filter", deployments={"name": {"any_": ["single-run"]}})
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert list((server.project.root / "state/store/evaluate").glob("*/metrics.json"))
    names = {task["name"] for task in server.ask("task_runs/filter")}
    assert {re.sub(r"[ -].*", "", name) for name in names} >= {"prepare", "train", "embed", "evaluate", "publish"}
    limits = {entry["name"]: entry["limit"] for entry in server.ask("v2/concurrency_limits/filter")}
    assert limits["dml-workers"] == 2


def test_a_limit_below_what_a_run_takes_is_said_at_once(server: Server) -> None:
    server.prefect("gcl", "update", "dml-workers", "--limit", "1")
    printed = server.project.run("dml", "run", "synthetic", "untrained", code=2, **server.environment)
    assert "Prefect's limit 'dml-workers' is 1, a run takes 2 workers" in printed
