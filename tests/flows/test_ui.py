"""`dml ui`: the page that compares the variants, reachable only from this machine; no command line has the database's address."""

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
from typer.testing import CliRunner

from dml_core.errors import ConfigError, TrackingError
from flows.cli import tracking
from flows.cli.app import app
from tasks.tracking.tags import Tag
from tests.conftest import ROOT


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


def opener(folder: Path) -> dict[str, str]:
    """Return the environment of a display whose browser writes the addresses that it opens to `opened.txt` in the folder."""
    script = folder / "browser"
    script.write_text(f'#!/bin/sh\necho "$1" >> "{folder}/opened.txt"\n')
    script.chmod(0o755)
    return {"DISPLAY": ":0", "BROWSER": f"{script} %s"}


def ended(server: psutil.Process) -> None:
    for process in [*server.children(recursive=True), server]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.slow
@pytest.mark.proof
def test_the_results_are_shown_to_this_machine_alone_and_a_browser_opens_at_a_terminal_only(tmp_path: Path) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    database = tmp_path / "state" / "mlflow.db"
    database.parent.mkdir()
    client = MlflowClient(f"sqlite:///{database}")
    experiment = client.create_experiment("dml-repro/fashion-mnist", tags={Tag.NOTE: "Best mean"})
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PREFECT_", "DML_", "RAY_"))}
    environment = kept | opener(tmp_path) | {"PYTHONPATH": str(ROOT)}
    terminal, output = os.openpty()
    for stdout in (subprocess.PIPE, output):
        port = free_port()
        page = f"http://127.0.0.1:{port}/#/experiments/{experiment}/runs?viewStateShareKey=variants&workflowType=machine_learning"
        command = [sys.executable, "-m", "flows.cli", "ui", "--port", str(port)]
        started = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=stdout)
        server = psutil.Process(started.pid)
        try:
            assert "dml-repro/fashion-mnist" in experiments(port)
            listening, words = set(), list[str]()
            for process in (server, *server.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):  # MLflow's helper ends early
                    words += process.cmdline()
                    listening |= {entry.laddr.ip for entry in process.net_connections("inet") if entry.status == psutil.CONN_LISTEN}
            assert listening == {"127.0.0.1"}
            assert not [word for word in words if str(database) in word]
            if stdout == output:
                until = time.monotonic() + 60
                while not (tmp_path / "opened.txt").exists() and time.monotonic() < until:
                    time.sleep(0.2)
                assert (tmp_path / "opened.txt").read_text() == f"{page}\n"
        finally:
            ended(server)
            started.wait()
        if stdout == subprocess.PIPE:
            assert started.stdout is not None
            assert page in started.stdout.read().decode()
            assert not (tmp_path / "opened.txt").exists(), "a script reads the address, no person waits for a browser"
    assert page in os.read(terminal, 4096).decode().replace("\r\n", "")


VIEW = "http://mlflow.example:5000/#/experiments/{}/runs?viewStateShareKey=variants&workflowType=machine_learning"
ALL = "http://mlflow.example:5000/#/experiments?workflowType=machine_learning"


@pytest.mark.parametrize(
    ("found", "words", "page"),
    [
        ({"fashion-mnist": "2", "synthetic": "1"}, [], VIEW.format(1)),  # the first of params.yaml
        ({"fashion-mnist": "2", "birds": "3"}, [], VIEW.format(2)),
        ({"fashion-mnist": "2", "birds": "3"}, ["birds"], VIEW.format(3)),
        ({"birds": "3"}, [], ALL),
        ({}, [], ALL),
    ],
)
def test_the_comparison_on_a_server_is_opened_there(
    found: dict[str, str], words: list[str], page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000/")
    opened: list[str] = []
    monkeypatch.setattr(tracking, "standing_comparisons", lambda uri: found)
    monkeypatch.setattr(tracking.webbrowser, "open", opened.append)
    for display, more, expected in ((False, [], []), (True, ["--no-open"], []), (True, [], [page])):
        monkeypatch.setattr(tracking, "_has_display", lambda display=display: display)
        assert CliRunner().invoke(app, ["ui", *words, *more], catch_exceptions=False).stdout == f"MLflow: {page}\n"
        assert opened == expected
    monkeypatch.setenv("MLFLOW_WORKSPACE", "birds")
    assert CliRunner().invoke(app, ["ui", *words, "--no-open"], catch_exceptions=False).stdout == f"MLflow: {page}&workspace=birds\n"
    assert "--port is not used" in CliRunner().invoke(app, ["ui", *words, "--no-open", "--port", "5001"], catch_exceptions=False).stderr
    with pytest.raises(ConfigError, match="unknown dataset of the comparison 'syntetic'; did you mean 'synthetic'"):
        CliRunner().invoke(app, ["ui", "syntetic"], catch_exceptions=False)
    if "synthetic" not in found:
        with pytest.raises(TrackingError, match=r"no comparison on 'synthetic'; it has.*; run dml reproduce --dataset synthetic$"):
            CliRunner().invoke(app, ["ui", "synthetic"], catch_exceptions=False)


def test_no_browser_opens_when_the_server_ended_before_it_listened(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([10, 10, 10, 1])
    monkeypatch.setattr(tracking.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(tracking.webbrowser, "open", lambda page: pytest.fail("nothing listens"))
    tracking._open_when_ready("http://127.0.0.1", free_port())
