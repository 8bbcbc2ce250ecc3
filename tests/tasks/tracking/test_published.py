"""Reading MLflow's runs: every page of a search, not only the first."""

import os
import shutil
import sqlite3
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient

from dml_core.errors import TrackingError
from tasks.tracking import queries
from tasks.tracking.connection import all_pages, project_runs
from tasks.tracking.published import published_as, published_runs, search_published, standing_comparisons
from tasks.tracking.tags import Tag

NUM_RUNS, PAGE = 132, 50
METRICS = [{"key": "recall_at_1", "value": 0.5}, {"key": "nmi", "value": "NaN"}]


class Page(list[int]):
    """One page of a search by MLflow's client."""

    token: str | None = None


def test_all_pages_of_a_search_are_read() -> None:
    def search(max_results: int, page_token: str | None) -> Page:
        start = int(page_token or 0)
        page = Page(range(start, min(start + PAGE, NUM_RUNS)))
        page.token = str(start + PAGE) if start + PAGE < NUM_RUNS else None
        return page

    assert all_pages(search) == list(range(NUM_RUNS))


def test_a_server_is_asked_for_all_pages_of_a_comparison_s_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(method: str, address: str, timeout: float, json: dict[str, Any]) -> SimpleNamespace:
        content: dict[str, Any] = {"experiments": [{"experiment_id": "1"}]}
        if address.endswith("runs/search"):
            start = int(json.get("page_token", 0))
            content = {"runs": [_run(number) for number in range(start, min(start + PAGE, NUM_RUNS))]}
            content |= {"next_page_token": str(start + PAGE)} if start + PAGE < NUM_RUNS else {}
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: content)

    monkeypatch.setattr("requests.request", answer)
    monkeypatch.setattr(queries, "check_available", lambda uri: None)
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    found = published_runs("http://mlflow", "d", "comparison on d")
    assert [(run.variant, run.seed) for run in found] == [("a", seed) for seed in range(NUM_RUNS)]
    assert found[0].metrics == {"recall_at_1": 0.5}, "NaN is no score, as in a database"


def _run(seed: int) -> dict[str, Any]:
    tags = [{"key": Tag.VARIANT, "value": "a"}, {"key": Tag.SEED, "value": str(seed)}]
    return {"info": {"run_id": f"r{seed}", "experiment_id": "1"}, "data": {"metrics": METRICS, "tags": tags}}


SCHEMA = """
    CREATE TABLE experiments (experiment_id INTEGER, name TEXT);
    CREATE TABLE runs (run_uuid TEXT, experiment_id INTEGER, lifecycle_stage TEXT);
    CREATE TABLE tags (run_uuid TEXT, key TEXT, value TEXT);
    CREATE TABLE latest_metrics (run_uuid TEXT, key TEXT, value REAL, is_nan INTEGER);
    INSERT INTO experiments VALUES (1, 'dml-repro/d'), (2, 'dml-repro/other');
"""


def test_of_a_database_the_comparison_s_current_whole_runs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables that are read, built by hand: run -> experiment, stage, comparison, whether it is complete."""
    runs = {
        "late": (1, "active", "c", "true"),
        "early": (1, "active", "c", "true"),
        "deleted": (1, "deleted", "c", "true"),
        "begun": (1, "active", "c", "false"),
        "another's": (1, "active", "other", "true"),
        "elsewhere": (2, "active", "c", "true"),
    }
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA)
        for run, (experiment, stage, comparison, whole) in runs.items():
            tags = {Tag.PART: comparison, Tag.PUBLISHED: whole, Tag.VARIANT: "a", Tag.SEED: "2" if run == "late" else "1"}
            database.execute("INSERT INTO runs VALUES (?, ?, ?)", (run, experiment, stage))
            database.executemany("INSERT INTO tags VALUES (?, ?, ?)", [(run, *tag) for tag in tags.items()])
            database.executemany("INSERT INTO latest_metrics VALUES (?, ?, ?, ?)", [(run, "nmi", 0.5, 0), (run, "gone", 0.0, 1)])
    monkeypatch.setattr(queries, "check_available", lambda uri: None)
    found = published_runs(f"sqlite:///{path}", "d", "c")
    assert [(run.run_id, run.variant, run.seed, run.metrics) for run in found] == [
        ("early", "a", 1, {"nmi": 0.5}),
        ("late", "a", 2, {"nmi": 0.5}),
    ]
    for missing in (f"sqlite:///{path}x", f"sqlite:///{path}"):
        assert published_runs(missing, "d", "nothing") == []
    path.write_bytes(b"no database" * 100)
    with pytest.raises(TrackingError, match=r"^MLflow's database .*mlflow.db cannot be read: [^\n]+$"):
        published_runs(f"sqlite:///{path}", "d", "c")


def test_the_identities_and_comparisons_of_a_database_are_those_that_mlflow_s_client_finds(mlflow_database: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{shutil.copy(mlflow_database, tmp_path)}"
    client = MlflowClient(uri)
    for experiment in ("dml-repro/d", "elsewhere", "dml-repro/deleted"):
        number = client.create_experiment(experiment, tmp_path.as_uri())
        for run in ("run", "deleted run"):
            tags = {Tag.IDENTITY: f"{run} of {experiment}", Tag.PART: f"comparison of {experiment}", Tag.VARIANT: "a"}
            created = client.create_run(number, tags=tags)
            if run == "deleted run":
                client.delete_run(created.info.run_id)
        client.create_run(number, tags={Tag.COMPARISON: "a comparison's own run"})
    client.delete_experiment(number)
    found = [run.data.tags for run in project_runs(client, {})]
    assert len(found) == 2
    assert published_as(uri) == ({"run of dml-repro/d"}, {"comparison of dml-repro/d"})
    assert published_as(uri) == tuple({run[name] for run in found if name in run} for name in (Tag.IDENTITY, Tag.PART))


class Refusing(BaseHTTPRequestHandler):
    """A server that answers every call with an error whose body looks like a result."""

    def do_POST(self) -> None:
        """Answer with error 500."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(500)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Protected(BaseHTTPRequestHandler):
    """A server without runs that requires a login."""

    def do_POST(self) -> None:
        """Answer."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_user = self.headers.get("Authorization") == f"Basic {b64encode(b'user:secret').decode()}"
        self.send_response(200 if is_user else 401)
        self.end_headers()
        self.wfile.write(b'{"experiments": []}')

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def protected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a protected server, whose login only MLflow's file of credentials has."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_TRACKING_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow/credentials").write_text("[mlflow]\nmlflow_tracking_username = user\nmlflow_tracking_password = secret\n")
    with HTTPServer(("127.0.0.1", 0), Protected) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_login_in_mlflow_s_file_of_credentials_is_used_to_read_too(protected: str) -> None:
    assert published_runs(protected, "d", "comparison on d") == []
    assert standing_comparisons(protected) == {}
    assert published_as(protected) == (set(), set())


@pytest.mark.parametrize("text", ["mlflow_tracking_password = planted", "[mlflow]\nmlflow_tracking_password = %planted"])
def test_a_file_of_credentials_that_cannot_be_parsed_is_one_line_without_the_password(protected: str, tmp_path: Path, text: str) -> None:
    (tmp_path / ".mlflow/credentials").write_text(text)
    for read in (published_runs, search_published):
        with pytest.raises(TrackingError, match="credentials cannot be used: cannot be parsed") as caught:
            read(protected, "d", "comparison on d")
        assert "planted" not in str(caught.value)


def test_an_error_of_the_server_is_no_empty_answer() -> None:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(TrackingError, match=r"^MLflow at http://127\.0\.0\.1:\d+ cannot be used: 500 Server Error[^\n]+$"):
            published_runs(f"http://127.0.0.1:{server.server_port}", "d", "c")
    finally:
        server.shutdown()
        server.server_close()
