"""`dml doctor`: working and broken parts with their remedies, without secrets; tests/e2e/test_stack.py runs it on real servers."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from tasks import doctor, environment
from tasks.doctor import Finding, examine
from tasks.environment import STACK_ENV, find_project, open_project, stack_text
from tasks.stack.automations import replace_automations
from tasks.tracking.connection import schemas
from tests.conftest import ROOT
from tests.tasks.test_git import committed, git

SECRET = "planted-secret"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without any configuration."""
    configured = ("MLFLOW_", "PREFECT_", "RAY_", "DML_", "AWS_")
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if not name.startswith(configured)})
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / ".dvc", tmp_path / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(what: str) -> Finding:
    return {finding.what: finding for finding in examine(open_project())}[what]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def old_server() -> Iterator[str]:
    """A server that reports an old version and denies access to MLflow's experiments; no old release can be installed next to ours."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'"3.0.1"')

        def do_POST(self) -> None:
            self.send_response(403)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_project_that_nothing_is_configured_for_is_in_order(here: Path) -> None:
    findings = examine(find_project())
    assert [(finding.what, finding.result) for finding in findings if finding.status == "wrong"] == []
    assert not (here / "state" / "mlflow.db").exists(), "looking makes nothing"


def test_a_checkout_that_another_user_owns_is_a_note_with_git_s_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = committed(tmp_path / "project")
    assert doctor._git(project).result == git(project.root, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    finding = doctor._git(project)
    assert (finding.status, finding.remedy) == ("note", f"git config --global --add safe.directory {project.root}")


def test_packages_of_an_extra_may_be_missing_but_not_of_another_version(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "dml-core[figures,pml]==0.1.0",
        "numpy<2.5,>=2.0",
        'ray[default]==2.60.0; extra == "pipeline"',
        'fastapi<0.151; extra == "pipeline"',
    ]
    monkeypatch.setattr(doctor, "requires", lambda name: lines)
    for installed, status, said in (
        ({"dml-core": "0.1.0", "ray": "2.60.0"}, "ok", "ray 2.60.0"),
        ({"dml-core": "0.1.0", "ray": "2.60.0+local"}, "ok", "ray 2.60.0+local"),  # as torch's builds for CUDA; pip accepts them
        ({"dml-core": "0.1.0", "ray": "missing"}, "ok", "ray missing"),
        ({"dml-core": "0.1.0", "ray": "2.59.0"}, "wrong", "ray is 2.59.0, expected 2.60.0"),
        ({"dml-core": "missing", "ray": "2.60.0"}, "wrong", "dml-core is missing, expected 0.1.0"),
    ):
        monkeypatch.setattr(doctor, "version_of", installed.__getitem__)
        packages = doctor._packages(find_project())
        assert (packages.status, packages.result) == (status, said)


def test_packages_are_compared_with_the_checkout_s_pins_of_today(here: Path) -> None:
    """An editable project's metadata are those of its installation, and stay after `git pull`."""
    file = here / "pyproject.toml"
    pins = 'dependencies = ["dml-core[pml]==9.9.9", "numpy>=2"]\noptional-dependencies.pipeline = ["ray[default]==9.9.8", "absent==1"]'
    file.write_text(f'[project]\nname = "dml-repro"\n{pins}\n')
    packages = doctor._packages(find_project())
    assert packages.status == "wrong"
    assert packages.result == f"dml-core is {version('dml-core')}, expected 9.9.9; ray is {version('ray')}, expected 9.9.8"
    assert packages.remedy.startswith("make -B .venv/.done")
    file.write_text(file.read_text().replace("dml-repro", "someones-own"))
    assert doctor._packages(find_project()).status == "ok"


def test_gpus_that_torch_cannot_use(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEVICES", here)
    assert found("gpus").result == "none on this machine"
    (here / "nvidia0").touch()
    monkeypatch.setattr(doctor, "num_gpus", lambda: 0)
    assert (found("gpus").status, found("gpus").result) == ("note", "torch can use none of this machine's GPUs; runs train on the CPU")
    assert "driver" in found("gpus").remedy
    monkeypatch.setattr(doctor, "num_gpus", lambda: 2)
    assert (found("gpus").status, found("gpus").result) == ("ok", "2 GPUs")


def test_servers_that_are_not_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "PREFECT_API_URL": f"http://{address}/api",
        "MLFLOW_TRACKING_URI": f"http://{address}",
        "RAY_ADDRESS": address,
        "DML_STORE": "s3://bucket/prefix",
        "AWS_ENDPOINT_URL": f"http://{address}",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    findings = {finding.what: finding for finding in examine(find_project())}
    for what in ("prefect", "mlflow", "ray", "store"):
        assert (findings[what].status, findings[what].result) == ("wrong", "does not answer"), findings[what]
        assert findings[what].remedy


def test_servers_that_accept_and_stay_silent_do_not_answer(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a tunnel whose other end is gone; the checks end all the same, each after seconds."""
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(doctor, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = {
            "PREFECT_API_URL": f"{address}/api",
            "MLFLOW_TRACKING_URI": address,
            "DML_STORE": "s3://bucket/prefix",
            "AWS_ENDPOINT_URL": address,
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        findings = {finding.what: finding for finding in examine(find_project())}
        assert time.monotonic() - began < 20
    for what in ("prefect", "mlflow", "store"):
        assert (findings[what].status, findings[what].result) == ("wrong", "does not answer"), findings[what]


def test_a_folder_as_the_store_of_a_cluster(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, result in (
        ("127.0.0.1:6379", "can be written"),
        ("10.0.0.1:6379", "a folder, which every node of the Ray cluster must reach"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert doctor._store(find_project()).result == result


def test_an_s3_store_that_is_up_and_a_bucket_that_is_not_there(here: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DML_STORE", f"s3://{s3_bucket}/team")
    assert found("store").status == "ok"
    monkeypatch.setenv("DML_STORE", "s3://no-such-bucket")
    assert (found("store").status, found("store").result) == ("wrong", "cannot be written")


def test_a_server_that_is_older_or_refuses(here: Path, old_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{old_server}/api")
    assert found("prefect").status == "wrong"
    assert "the server has 3.0.1" in found("prefect").result
    monkeypatch.setenv("MLFLOW_TRACKING_URI", old_server)
    assert (found("mlflow").result, found("mlflow").remedy) == ("refuses (403)", "add its host to --allowed-hosts")


@pytest.mark.parametrize(
    ("login", "page", "status", "result"),
    [
        ("user:secret", version("mlflow"), "ok", f"{version('mlflow')}, the same as on this machine"),
        ("user:secret", f"Welcome, {SECRET}", "wrong", "answers without a version"),
        ("user:wrong", version("mlflow"), "wrong", "refuses (401)"),
    ],
)
def test_an_mlflow_server_with_basic_auth(
    login: str, page: str, status: str, result: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It requires the login for every page, also that of its version."""

    class Protected(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_user = self.headers.get("Authorization") == f"Basic {b64encode(b'user:secret').decode()}"
            self.send_response(200 if is_user else 401)
            self.end_headers()
            self.wfile.write((page if is_user else "You are not authenticated").encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    user, _, password = login.partition(":")
    with HTTPServer(("127.0.0.1", 0), Protected) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        assert (found("mlflow").status, found("mlflow").result) == (status, result)
        monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
        monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
        monkeypatch.setenv("HOME", str(here))
        (here / ".mlflow").mkdir()
        stored = here / ".mlflow/credentials"
        stored.write_text(f"[mlflow]\nmlflow_tracking_username = {user}\nmlflow_tracking_password = {password}\n")
        assert (found("mlflow").status, found("mlflow").result) == (status, result)
        stored.write_text("[mlflow]\nmlflow_tracking_password = %\n")
        assert found("mlflow").status == "wrong"
        assert "cannot be parsed" in found("mlflow").result
        server.shutdown()


def test_a_bucket_to_which_mlflow_s_clients_write_themselves(here: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(version("mlflow").encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["filter"] == "name LIKE 'dml-repro/%'", "others' experiments may be in others' buckets"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"experiments": [{"artifact_location": f"s3://{buckets[0]}/mlflow/1"}]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        buckets = [s3_bucket, "no-such-bucket"]
        assert found("mlflow").status == "ok"
        del buckets[0]
        assert found("mlflow").result == "this machine cannot write to s3://no-such-bucket/mlflow/1, where MLflow's files are"
        server.shutdown()


@pytest.mark.slow
def test_automations_are_loaded_with_the_login_and_after_the_database_was_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's server with PREFECT_SERVER_API_AUTH_STRING refuses every other request; while SQLite is locked, it answers with 503."""
    refused: list[str] = []
    paths: list[str] = []

    class Protected(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Authorization") != f"Basic {b64encode(b'user:secret').decode()}":
                refused.append(self.path)
            paths.append(self.path)
            self.send_response(401 if refused else 503 if paths.count(self.path) <= 2 else 200)
            self.end_headers()
            self.wfile.write(b"[]")

        def do_GET(self) -> None:
            self.send_error(404)  # it has no webhook

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "user:secret")
    with HTTPServer(("127.0.0.1", 0), Protected) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        replace_automations(f"http://127.0.0.1:{server.server_port}/api", ROOT / "infra/automations.yaml")
        server.shutdown()
    assert refused == []


def test_automations_that_are_loaded_without_a_webhook_keep_the_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an upgrade from another shell."""
    sent: dict[str, dict[str, object]] = {}

    class Prefect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/api/automations/":
                sent[body["name"]] = body["actions"][0]
            self.answer(b"[]")

        def do_GET(self) -> None:
            assert self.path == "/api/block_types/slug/webhook/block_documents/name/dml-webhook"
            self.answer(b'{"id": "of an earlier up"}')

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.delenv("DML_WEBHOOK", raising=False)
    with HTTPServer(("127.0.0.1", 0), Prefect) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        replace_automations(f"http://127.0.0.1:{server.server_port}/api", ROOT / "infra/automations.yaml")
        server.shutdown()
    assert sent["report-alarms"]["block_document_id"] == "of an earlier up"
    assert len(sent) == 5


@pytest.mark.parametrize(
    ("code", "workers", "status", "result"),
    [
        (200, [], "wrong", "no worker is online"),
        (200, [{"status": "OFFLINE"}], "wrong", "no worker is online"),
        (200, [{"status": "OFFLINE"}, {"status": "ONLINE"}], "ok", "1 of 2 workers online"),
        (404, {"detail": "Not Found"}, "note", "no such pool"),
        (401, {"detail": "Unauthorized"}, "note", "unknown: Prefect refuses or does not answer"),
    ],
)
def test_the_workers_of_a_server_s_pool(
    code: int, workers: object, status: str, result: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheduled runs of a pool without a worker are never started; a server without the pool has no schedules."""

    class Pool(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(code if self.path == "/api/work_pools/dml/workers/filter" else 500)
            self.end_headers()
            self.wfile.write(json.dumps(workers).encode())

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(version("prefect")).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Pool) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
        assert (found("prefect").status, found("schedules").status, found("schedules").result) == ("ok", status, result)
        server.shutdown()


def test_a_damaged_database_and_records_that_wait(here: Path) -> None:
    state = here / "state"
    (state / "outbox").mkdir(parents=True)
    (state / "outbox" / "a.json").write_text("{}")
    assert (found("outbox").status, found("outbox").remedy) == ("note", "dml sync")
    (state / "mlflow.db").write_bytes(b"no database" * 100)
    assert found("mlflow").status == "wrong"
    (state / "mlflow.db").unlink()
    (state / "mlflow.db").mkdir()
    assert (found("mlflow").result, found("mlflow").remedy) == ("it is not a file", "move it away")
    (state / "mlflow.db").rmdir()
    with sqlite3.connect(state / "mlflow.db") as database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("INSERT INTO alembic_version VALUES (?)", [schemas()[1]])
        database.execute("CREATE TABLE runs (lifecycle_stage TEXT)")
        database.execute("INSERT INTO runs VALUES ('active')")
    assert "1 run" in found("mlflow").result


def test_an_empty_database_is_one_that_the_first_run_creates(here: Path) -> None:
    (here / "state").mkdir()
    (here / "state" / "mlflow.db").touch()
    assert (found("mlflow").status, found("mlflow").result) == ("ok", "missing or empty: the first run creates it")


def test_parameters_and_a_remote_that_are_wrong(here: Path) -> None:
    (here / "params.yaml").write_text("datasets: {}\nunknown: 1\n")
    assert found("parameters").status == "wrong"
    (here / ".dvc" / "config").write_text("[core]\nremote = team\n['remote \"team\"']\nurl = /dev/null/nowhere\n")
    assert (found("dvc remote").status, found("dvc remote").where) == ("wrong", "team: /dev/null/nowhere")


@pytest.mark.parametrize(
    ("url", "endpoint", "status", "result"),
    [
        ("s3://bucket/x", "", "note", "login and content were not checked"),  # of Amazon's S3, which was not asked
        ("s3://bucket/x", "http://127.0.0.1:1", "wrong", "http://127.0.0.1:1 does not answer"),
        ("ssh://host/x", "http://127.0.0.1:1", "note", "login and content were not checked"),  # another server than S3's
        ("http://127.0.0.1:1/x", "", "wrong", "http://127.0.0.1:1/x does not answer"),
    ],
)
def test_a_remote_of_dvc_is_asked_at_its_own_server(
    url: str, endpoint: str, status: str, result: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    (here / ".dvc" / "config").write_text(f"[core]\nremote = team\n['remote \"team\"']\nurl = {url}\n")
    finding = doctor._dvc_remote(find_project())
    assert (finding.status, finding.result) == (status, result)


def test_settings_of_the_stack_are_used_and_the_user_s_come_first(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = here / "state" / STACK_ENV
    file.parent.mkdir(parents=True)
    file.write_text(stack_text({"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{free_port()}", "DML_STORE": str(here / "stacked")}))
    monkeypatch.setenv("DML_STORE", str(here / "own"))
    project = find_project()
    assert (project.store, project.tracking_uri[:17]) == (str(here / "own"), "http://127.0.0.1:")
    assert found("stack").result == "used except for DML_STORE"


def test_the_command_ends_with_2_and_prints_no_secret(here: Path) -> None:
    address = f"user:{SECRET}@127.0.0.1:{free_port()}"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PREFECT_API_URL": f"http://{address}/api",
        "MLFLOW_TRACKING_URI": f"http://{address}/?token={SECRET}",
        "MLFLOW_TRACKING_PASSWORD": SECRET,
        "MLFLOW_TRACKING_USERNAME": "user",
        "PREFECT_API_AUTH_STRING": f"user:{SECRET}",
        "RAY_AUTH_TOKEN": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://{address}",
        "DML_STORE": "s3://bucket/prefix",
    }
    ran = subprocess.run([sys.executable, "-m", "flows.cli", "doctor"], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == ["error: 3 of 14 checks failed: store, mlflow, prefect; see above for what to do"]
    assert "does not answer" in ran.stdout
    assert SECRET not in ran.stdout + ran.stderr
