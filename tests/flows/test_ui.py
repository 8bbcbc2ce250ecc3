"""`dml ui`: MLflow's pages with the project's results, reachable only from this machine; no command line has the database's address."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.proof]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def experiments(port: int) -> list[str]:
    """Wait for the server and return the names of its experiments."""
    url = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search"
    request = urllib.request.Request(url, b'{"max_results": 10}', {"Content-Type": "application/json"})
    until = time.monotonic() + 180
    while True:
        with suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
            return [entry["name"] for entry in json.loads(answer.read())["experiments"]]
        assert time.monotonic() < until, "no answer"
        time.sleep(0.2)


def test_the_results_are_shown_to_this_machine_alone(tmp_path: Path) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    database = tmp_path / "state" / "mlflow.db"
    database.parent.mkdir()
    MlflowClient(f"sqlite:///{database}").create_experiment("dml-repro/of-this-project")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PREFECT_", "DML_", "RAY_"))}
    port = free_port()
    started = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "ui", "--port", str(port)], cwd=tmp_path, env=kept | {"PYTHONPATH": str(ROOT)}
    )
    server = psutil.Process(started.pid)
    try:
        assert "dml-repro/of-this-project" in experiments(port)
        processes = [server, *server.children(recursive=True)]
        listening = {
            entry.laddr.ip for process in processes for entry in process.net_connections("inet") if entry.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        assert not [word for process in processes for word in process.cmdline() if str(database) in word]
    finally:
        for process in [*server.children(recursive=True), server]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        started.wait()
