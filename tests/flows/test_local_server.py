"""The server of one flow: it answers on this machine only, ends with its process, and a failed start is one line within seconds."""

import http.client
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from dml_core.errors import TrainingError
from flows import local_server
from flows.local_database import copy_empty_database, keep_created_database
from flows.local_server import LocalServer
from tasks.stack.prefect_api import login


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prefect's folder of a new project, of a user without a kept database."""
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    (tmp_path / "prefect").mkdir()
    return tmp_path / "prefect"


def schema(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as database:
        return {text for (text,) in database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}


def revision(path: Path) -> str:
    with closing(sqlite3.connect(path)) as database:
        return str(database.execute("SELECT version_num FROM alembic_version").fetchone()[0])


@pytest.mark.slow
def test_it_serves_on_this_machine_and_its_new_database_is_copied_to_the_next_project(home: Path) -> None:
    assert not copy_empty_database(home)
    server = LocalServer()
    server.wait()
    keep_created_database(home)
    address = urlsplit(server.url)
    with closing(http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)) as connection:
        for known, answer in (({}, 401), (login(server.login, None), 200)):
            headers = {"Content-Type": "application/json", **known}
            connection.request("POST", f"{address.path}/flow_runs/count", body="{}", headers=headers)
            response = connection.getresponse()
            assert (response.status, response.read() == b"0") == (answer, answer == 200), "others get no answer"
        connection.request("GET", f"{address.path}/health", headers={"Origin": "https://evil.example"})
        assert connection.getresponse().headers["Access-Control-Allow-Origin"] is None, "a page in a browser may not read what it answers"
    (process,) = [child for child in psutil.Process().children() if local_server.__name__ in child.cmdline()]
    assert {listening.laddr.ip for listening in process.net_connections() if listening.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    server.stop()
    assert not process.is_running()

    other = home.with_name("other")
    other.mkdir()
    assert copy_empty_database(other)
    assert schema(other / "prefect.db") == schema(home / "prefect.db")
    assert revision(other / "prefect.db") == revision(home / "prefect.db")


def test_a_server_that_ends_at_once_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    server = LocalServer()
    with pytest.raises(TrainingError, match="did not start") as raised:
        server.wait()
    assert "\n" not in str(raised.value)
    server.stop()
