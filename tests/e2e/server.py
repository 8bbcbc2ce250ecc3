"""A Prefect server on this machine, with the deployments of infra/prefect.yaml and a worker that executes one run at a time."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flows.local_database import copy_empty_database
from tasks.stack.prefect_api import prefect_session
from tests.e2e.conftest import HANGS_SECONDS, Project


@dataclass
class Server:
    """A Prefect server on this machine, and a project deployed to it."""

    process: psutil.Popen
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

    def stop(self) -> None:
        """End the worker and the server, if they have not ended."""
        self.stop_worker()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(timeout=30)

    def ask(self, path: str, method: str = "POST", **body: object) -> Any:
        answer = prefect_session().request(method, f"{self.url}/{path}", json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def deployment(self, name: str) -> dict:
        return self.ask(f"deployments/name/reproduce/{name}", method="GET")

    def finished(self, deployment: str) -> dict:
        """Wait for a finished run of the deployment, and return the first."""
        deadline = time.monotonic() + HANGS_SECONDS
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


@contextmanager
def running_server(project: Project, folder: Path) -> Iterator[Server]:
    """Start a server with its files in a folder, deploy the project to it, and end both afterwards."""
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
    of_server = environment | {"PREFECT_HOME": str(folder / "prefect")}
    with (folder / "server.log").open("w") as log:
        process = psutil.Popen(command, env=of_server, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    server = Server(process, url, environment, project, folder / "worker.log")
    try:
        wait_for(f"{url}/health")
        server.start_worker()
        yield server
    finally:
        server.stop()


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 600
    while True:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.5)
