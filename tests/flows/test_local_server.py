"""The server of one flow: it answers on this machine only, ends with its process, and a failed start is one line within seconds."""

import http.client
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from dml_core.errors import TrainingError
from flows import local_server
from flows.local_database import copy_empty_database
from flows.local_server import LocalServer
from tasks.stack.prefect_api import login


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files of a user without a kept database."""
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def schema(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as database:
        return {text for (text,) in database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}


def revision(path: Path) -> str:
    with closing(sqlite3.connect(path)) as database:
        return str(database.execute("SELECT version_num FROM alembic_version").fetchone()[0])


@pytest.mark.slow
def test_it_serves_on_this_machine_and_its_new_database_is_copied_for_the_next_flow(temporary: Path) -> None:
    other = temporary.with_name("other")
    other.mkdir()
    assert not copy_empty_database(other)
    server = LocalServer()
    server.wait()
    (home,) = temporary.iterdir()
    assert not (temporary.with_name("prefect") / "prefect.db").exists(), "machines that share the state folder would share it"
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
    assert copy_empty_database(other)
    assert schema(other / "prefect.db") == schema(home / "prefect.db")
    assert revision(other / "prefect.db") == revision(home / "prefect.db")
    process.terminate()  # as the supervisor does if the flow was killed, which then cannot remove the server's folder
    process.wait(60)
    assert not list(temporary.iterdir())
    server.stop()


def test_a_server_that_ends_at_once_is_one_line(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    server = LocalServer()
    with pytest.raises(TrainingError, match="did not start") as raised:
        server.wait()
    assert "\n" not in str(raised.value)
    server.stop()


def test_without_a_writable_folder_of_ray_its_folder_is_a_usual_temporary_one(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("RAY_TMPDIR", "/proc")
    server = LocalServer()
    assert list(temporary.iterdir())
    server.stop()
    assert not list(temporary.iterdir())


def test_a_server_that_has_to_be_killed_leaves_no_files(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "END_SECONDS", 0.0)
    server = LocalServer()
    assert list(temporary.iterdir())
    server.stop()
    assert not list(temporary.iterdir())
