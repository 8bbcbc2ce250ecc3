"""No secret is written or shown, and nothing listens beyond this machine, for a project on its stack with failing and successful runs.

The secrets are those of the stack (the passwords of PostgreSQL and of Prefect's server, Ray's token) and planted ones: MLflow's login in
its address and in the environment, Prefect's API key, and the key of a user's own S3 server, which the stack uses here. The tests search
the output, every file of project, state and servers, every row of both databases, every object in the bucket, and the command lines of
all running processes.
"""

import base64
import json
import re
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg2
import pytest
from moto.server import ThreadedMotoServer
from psycopg2 import sql

from tasks.environment import stack_environment
from tasks.stack.settings import run_folder
from tests.e2e.conftest import Project
from tests.e2e.stacks import bucket, project_with_stack

pytestmark = [pytest.mark.slow, pytest.mark.proof]
PLANTED = {"MLflow": "planted4mlflow4password", "Prefect": "planted4prefect4key"}
OWN_S3 = {"AWS_ACCESS_KEY_ID": "team", "AWS_SECRET_ACCESS_KEY": "planted4s3s4secret"}
# Files with the stack's secrets, readable only by their owner, until `dml stack down`.
KEPT = {"chosen.json", "env", "supervisor.conf"}
RUN = ("dml", "run", "synthetic", "softtriple")


class Watcher:
    """Record, in a thread, the command lines of all processes and the addresses on which the project's processes listen.

    Those are its commands, and the processes in which Ray's nodes of its stack run the work of flows.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.commands: set[str] = set()
        self.listening: set[tuple[str, str]] = set()  # address and command
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.25):
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    command = " ".join(process.cmdline())
                    self.commands.add(command)
                    is_ours = any(part in command for part in ("flows.cli", "tasks.doctor", "import logging, ray"))
                    if is_ours or ("ray::" in command and process.cwd() == str(self._root)):
                        found = [entry for entry in process.net_connections("inet") if entry.status == psutil.CONN_LISTEN]
                        self.listening |= {(entry.laddr.ip, command) for entry in found}

    def end(self) -> None:
        self._over.set()
        self._thread.join()


class Story:
    """The data that the tests check: the project, its output, the watched processes, the secrets."""

    def __init__(self, project: Project, watcher: Watcher) -> None:
        self.project = project
        self.watcher = watcher
        self.state = project.root / "state"
        self.told = stack_environment(self.state)
        self.chosen = json.loads((self.state / "stack" / "chosen.json").read_text())
        self.secrets = {
            **PLANTED,
            "own S3": OWN_S3["AWS_SECRET_ACCESS_KEY"],
            **{name: str(value) for name, value in self.chosen["secrets"].items()},
        }
        self.printed = ""
        self.own = {
            "PREFECT_API_URL": self.told["PREFECT_API_URL"],  # allows tracebacks in Prefect's output
            "PREFECT_API_KEY": PLANTED["Prefect"],
            "MLFLOW_TRACKING_URI": self.told["MLFLOW_TRACKING_URI"].replace("//", f"//user:{PLANTED['MLflow']}@"),
            "MLFLOW_TRACKING_USERNAME": "user",
            "MLFLOW_TRACKING_PASSWORD": PLANTED["MLflow"],
        }

    def run(self, *command: str, code: int = 0, **environment: str) -> str:
        printed = self.project.run(*command, code=code, **(self.own | environment))
        self.printed += printed
        return printed

    def has_secret(self, text: bytes | str) -> list[str]:
        """Return the names of the secrets in a text, plain or base64-encoded as in a login header."""
        data = text.encode() if isinstance(text, str) else text
        logins = {name: [base64.b64encode(f"{user}:{value}".encode()) for user in ("user", "dml")] for name, value in self.secrets.items()}
        forms = {name: (value.encode(), *logins[name]) for name, value in self.secrets.items()}
        return [name for name, kinds in forms.items() if any(form in data for form in kinds)]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A stack with runs that fail in several ways, and one that succeeds while MLflow is unreachable and is delivered later."""
    project = project_with_stack(tmp_path_factory.mktemp("secrets") / "project", ("softtriple",))
    s3 = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    s3.start()
    watcher = Watcher(project.root)
    try:
        up = project.run("dml", "stack", "up", "--s3", "http://{}:{}".format(*s3.get_host_and_port()), **OWN_S3)
        told = Story(project, watcher)
        told.printed += up
        tell(told)
        watcher.end()
        yield told
    finally:
        project.run("dml", "stack", "down")
        s3.stop()


def tell(story: Story) -> None:
    away = f"http://user:{PLANTED['MLflow']}@127.0.0.1:{closed_port()}"
    story.run("dml", "doctor")
    assert "does not answer" in story.run("dml", "doctor", code=2, MLFLOW_TRACKING_URI=away)
    # The bucket and Prefect's server do not exist.
    assert "no-such-bucket" in story.run(*RUN, code=2, DML_STORE="s3://no-such-bucket/store")
    nobody = f"http://user:{PLANTED['Prefect']}@127.0.0.1:{closed_port()}/api"
    assert "does not answer" in story.run(*RUN, code=2, PREFECT_API_URL=nobody)
    # The loss fails in the workers.
    loss = story.project.root / "dml_core" / "losses" / "softtriple.py"
    whole = loss.read_text()
    loss.write_text(f"{whole}\n    def forward(self, *_):\n        raise RuntimeError('a fault of the loss')\n")
    assert "a fault of the loss" in story.run(*RUN, code=2)
    loss.write_text(whole)
    # The run succeeds without MLflow; its record is delivered later.
    assert "does not answer" in story.run(*RUN, MLFLOW_TRACKING_URI=away)
    assert "cannot be used" in story.run("dml", "sync", code=2, MLFLOW_TRACKING_URI=away)
    assert "1 record delivered" in story.run("dml", "sync")


def test_nothing_printed_has_a_secret(story: Story) -> None:
    assert len(story.printed) > 500
    assert story.has_secret(story.printed) == []


def test_no_command_line_has_a_secret_and_nothing_listens_beyond_this_machine(story: Story) -> None:
    watcher = story.watcher
    for part in ("mlflow server", "prefect server", "gcs_server", "flows.cli run", "flows.cli doctor", "RayTrainWorker"):
        assert any(part in command for command in watcher.commands), part
    assert [command for command in watcher.commands if story.has_secret(command)] == []
    assert {address for address, _ in watcher.listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, watcher.listening
    assert [command for _, command in watcher.listening if "ray::" in command], "no port of Ray's workers was seen"


def test_no_file_has_a_secret_but_those_that_keep_them(story: Story) -> None:
    run = run_folder(story.state)
    found: dict[Path, list[str]] = {}
    files = [path for folder in (story.project.root, run) for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 500
    for path in files:
        with suppress(FileNotFoundError):  # the running servers remove temporary files
            if names := story.has_secret(path.read_bytes()):
                found[path] = names
    assert {path for path in found if path.name not in KEPT} == set(), found
    assert found, "those that keep them are among what was searched"
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert not set(PLANTED) & {name for names in found.values() for name in names}


def test_no_row_of_a_database_has_a_secret(story: Story) -> None:
    num_rows = 0
    for database in ("mlflow", "prefect"):
        connection = psycopg2.connect(
            host="127.0.0.1", port=story.chosen["ports"]["postgres"], user="dml", password=story.secrets["postgres"], dbname=database
        )
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = 'public' AND table_type = 'BASE TABLE'")
            for (table,) in cursor.fetchall():
                cursor.execute(sql.SQL("SELECT entry::text FROM {} AS entry").format(sql.Identifier(table)))
                for (row,) in cursor.fetchall():
                    num_rows += 1
                    assert story.has_secret(row) == [], (database, table)
        connection.close()
    assert num_rows > 200


def test_no_object_in_the_bucket_has_a_secret(story: Story) -> None:
    assert story.told["AWS_SECRET_ACCESS_KEY"] == OWN_S3["AWS_SECRET_ACCESS_KEY"], "the bucket is on one's own server"
    client = bucket(story.project)
    names = [entry["Key"] for page in client.get_paginator("list_objects_v2").paginate(Bucket="dml") for entry in page.get("Contents", [])]
    assert any(name.endswith("checkpoint.pt") for name in names)
    assert any(name.startswith("mlflow/") for name in names)
    for name in names:
        assert story.has_secret(client.get_object(Bucket="dml", Key=name)["Body"].read()) == [], name


def test_down_leaves_the_bucket_of_ones_own_server_and_the_next_up_goes_on_from_it(story: Story) -> None:
    client, address = bucket(story.project), story.told["AWS_ENDPOINT_URL"]
    before = {entry["Key"] for entry in client.list_objects_v2(Bucket="dml")["Contents"]}
    assert before
    story.project.run("dml", "stack", "down")
    assert {entry["Key"] for entry in client.list_objects_v2(Bucket="dml")["Contents"]} == before
    story.project.run("dml", "stack", "up", "--s3", address, **OWN_S3)
    printed = story.project.run(*RUN, PREFECT_API_URL=stack_environment(story.state)["PREFECT_API_URL"])
    assert re.findall(r"^(\w+): reused$", printed, re.MULTILINE) == ["train", "embed", "evaluate"], printed
