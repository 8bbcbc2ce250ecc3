"""If the tracking server or database cannot be used, every access to MLflow ends at once with one line that gives the remedy."""

import os
import shutil
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
from mlflow.store.artifact.s3_artifact_repo import S3ArtifactRepository, _cached_get_s3_client
from mlflow.store.db import utils

from dml_core.errors import DmlError, TrackingError
from dml_core.evaluation.config import EvaluationConfig
from tasks.runs.records import ComparisonReport
from tasks.runs.specs import RunSpec
from tasks.storage import Store
from tasks.tracking.connection import TIMED_OUT, check_available, create_database, one_line_errors, open_client, schemas
from tasks.tracking.outbox import keep_report
from tasks.tracking.published import published_as, published_runs, search_published, standing_comparisons
from tasks.tracking.registered import LoggedNetwork, Registry
from tasks.tracking.tracker import Tracker
from tests.conftest import small_training
from tests.damage import DAMAGE
from tests.forked import forked

pytestmark = pytest.mark.slow
PARAMETERS = {"training": {"model": {"backbone": {}}}, "evaluation": {"role": "test"}}
NETWORK = LoggedNetwork("r", "m", PARAMETERS, {}, {}, {})
REPORT = ComparisonReport(comparison="c", dataset="d", role="test", folder=None, tags={})


def _sync(uri: str, folder: Path) -> None:
    keep_report(folder / "outbox", REPORT)
    _tracker(uri, folder).sync()


def _tracker(uri: str, folder: Path) -> Tracker:
    return Tracker(uri, folder, Store(str(folder / "store"), folder / "cache"))


def _promoting(uri: str, folder: Path) -> None:
    with Registry(uri).promoting("n"):
        pass


def _spec() -> RunSpec:
    return RunSpec(dataset="d", variant="v", seed=0, training=small_training("softmax"), evaluation=EvaluationConfig())


# Every public access to MLflow, called with its address and a folder.
WAYS: dict[str, Callable[[str, Path], object]] = {
    "published_runs": lambda uri, folder: published_runs(uri, "d", "c"),
    "search_published": lambda uri, folder: search_published(uri, "d", "c"),
    "standing_comparisons": lambda uri, folder: standing_comparisons(uri),
    "published_as": lambda uri, folder: published_as(uri),
    "Registry.fetch": lambda uri, folder: Registry(uri).fetch("models:/n@best", folder / "models"),
    "Registry.fetch_trained": lambda uri, folder: Registry(uri).fetch_trained("i", folder / "models"),
    "Registry.logged": lambda uri, folder: Registry(uri).logged("dml.identity", "i"),
    "Registry.frozen": lambda uri, folder: Registry(uri).frozen(NETWORK),
    "Registry.of_address": lambda uri, folder: Registry(uri).of_address("models:/n/1"),
    "Registry.embeddings": lambda uri, folder: Registry(uri).embeddings(NETWORK, folder / "embeddings"),
    "Registry.holder": lambda uri, folder: Registry(uri).holder("n", "best"),
    "Registry.promote": lambda uri, folder: Registry(uri).promote("n", "best", NETWORK, "gate", "card"),
    "Registry.promoting": _promoting,
    "Registry.count_attempt": lambda uri, folder: Registry(uri).count_attempt("n", "best"),
    "Tracker.sync": _sync,
    "Tracker.begin_run": lambda uri, folder: _tracker(uri, folder).begin_run("c", "i", _spec()),
    "Tracker.log_epochs": lambda uri, folder: _tracker(uri, folder).log_epochs("r", [("epoch/loss", 1.0, 0)]),
}
SWALLOWED = {"Tracker.publish", "Tracker.end_failed", "Tracker.load"}  # the flow continues: test_tracking.py; a server is asked nothing


def test_every_way_is_walked() -> None:
    for kind in (Registry, Tracker):
        public = {f"{kind.__name__}.{name}" for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}
        assert public <= WAYS.keys() | SWALLOWED, "a new way to MLflow"


def test_the_newest_schema_is_the_one_that_mlflow_itself_expects() -> None:
    known, newest = schemas()
    assert newest == utils._get_latest_schema_revision()  # type: ignore[no-untyped-call]
    assert newest in known
    assert len(known) > 30


def set_schema(path: Path, schema: str | None) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM alembic_version")
        database.executemany("INSERT INTO alembic_version VALUES (?)", [(schema,)] if schema else [])
        database.execute("DROP TABLE inputs")  # only in this version: MLflow would migrate it, or fail with over a hundred lines
        database.commit()


def _replace(path: Path, by: Callable[[Path], object]) -> None:
    path.unlink()
    by(path)


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (DAMAGE["cut"], "malformed; restore a copy, or move it away"),
    "garbled": (DAMAGE["garble"], "file is not a database; restore a copy"),
    "text": (lambda path: path.write_text("this is no database" * 100), "file is not a database; restore a copy"),
    "of an older version": (
        lambda path: set_schema(path, "451aebb31d03"),
        "an older MLflow wrote it; back it up, then: mlflow db upgrade sqlite:///",
    ),
    "of a newer version": (lambda path: set_schema(path, "f" * 12), "a newer MLflow wrote it; install that version"),
    "without a version": (lambda path: set_schema(path, None), "incomplete; restore a copy"),
    "of another program": (lambda path: _replace(path, _other_database), "it is not an MLflow database or incomplete"),
    "a folder": (lambda path: _replace(path, Path.mkdir), "it is not a file; move it away"),
}


def _other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE runs (name TEXT)")
        database.commit()


@pytest.mark.parametrize("how", UNUSABLE)
def test_a_database_that_cannot_be_used_is_one_line_on_every_way_and_stays_as_it_is(
    how: str, mlflow_database: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mlflow.db"
    shutil.copy(mlflow_database, path)
    damage, said = UNUSABLE[how]
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    for name, way in WAYS.items():
        with pytest.raises(TrackingError) as caught:
            way(f"sqlite:///{path}", tmp_path)
        assert said in str(caught.value), name
        assert str(caught.value).startswith(f"MLflow's database {path} cannot be used: "), name
        assert "\n" not in str(caught.value), name
    assert before == (path.read_bytes() if path.is_file() else None)


def test_a_sound_an_empty_and_a_missing_database_can_be_used(mlflow_database: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    for path in (mlflow_database, tmp_path / "empty.db", tmp_path / "missing.db"):
        check_available(f"sqlite:///{path}")
        assert published_as(f"sqlite:///{path}") == (set(), set())


def _killed_while_writing(path: Path) -> None:
    """Add a tag to a database, then be killed in a transaction, of which SQLite's journal remains."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA cache_size = 1")
    for value in ("'kept'", "'lost'"):
        database.execute("BEGIN")
        database.executemany(f"INSERT INTO experiment_tags VALUES (?, {value}, 0)", [(f"{value}{number}" * 99,) for number in range(200)])
        if value == "'kept'":
            database.execute("COMMIT")
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_while_writing(path: Path) -> Path:
    """Return the journal that a killed process leaves."""
    assert forked(_killed_while_writing, path) == -signal.SIGKILL
    journal = path.with_name(f"{path.name}-journal")
    assert journal.stat().st_size
    return journal


def _tags(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT value, count(*) FROM experiment_tags GROUP BY value").fetchall()


def test_a_database_whose_writer_was_killed_can_be_used_and_has_what_was_committed(mlflow_database: Path, tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    shutil.copy(mlflow_database, path)
    _kill_while_writing(path)
    check_available(f"sqlite:///{path}")
    assert _tags(path) == [("kept", 200)]


def test_a_folder_of_any_name_has_a_new_database_to_which_the_journal_of_one_that_was_moved_away_is_not_applied(
    mlflow_database: Path, tmp_path: Path
) -> None:
    path = tmp_path / 'Ann\'s "papers" ü%41 #1 + [x] 100%s :a' / "mlflow.db"
    path.parent.mkdir()
    shutil.copy(mlflow_database, path)
    journal = _kill_while_writing(path)
    path.rename(tmp_path / "mlflow-before.db")
    before = journal.read_bytes()
    client = open_client(f"sqlite:///{path}", path.parent)
    assert client.get_experiment("0").artifact_location == f"{path.parent.as_uri()}/mlruns/0"
    assert client.get_experiment(client.create_experiment("x", path.parent.as_uri())).name == "x"
    assert _tags(path) == []
    assert path.with_name("mlflow.db-journal.damaged-1").read_bytes() == before


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a port on which nothing listens; MLflow's own client would retry for minutes."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://user:word@127.0.0.1:{bound.getsockname()[1]}"


def test_a_server_that_does_not_answer_is_one_line_at_once_on_every_way(nobody: str, tmp_path: Path) -> None:
    began = time.monotonic()
    for name, way in WAYS.items():
        with pytest.raises(TrackingError, match=r"MLflow at http://127\.0\.0\.1:\d+ cannot be used: no answer; start it, or") as caught:
            way(nobody, tmp_path)
        assert "word" not in str(caught.value), name
    assert time.monotonic() - began < 60  # a single call took 246 s


class NotMlflow(BaseHTTPRequestHandler):
    """A server that is not MLflow."""

    def answer(self) -> None:
        """Answer every request with a page."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>\n<p>welcome\n</html>")

    do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_a_server_of_another_kind_is_one_line_on_every_way(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), NotMlflow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, way in WAYS.items():
        said = ""
        try:
            way(f"http://127.0.0.1:{server.server_port}", tmp_path)
        except DmlError as error:
            said = str(error)
        assert said, name
        assert "\n" not in said, name
        assert "no answer" not in said, name
    server.shutdown()


class Slow(NotMlflow):
    """A server that answers after a second, or with an error."""

    status = 200

    def answer(self) -> None:
        """Answer every request."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.status == 200:
            time.sleep(1.5)
        self.send_response(self.status)
        self.end_headers()

    do_PUT = answer  # noqa: N815


@pytest.mark.parametrize(("status", "said"), [(200, TIMED_OUT), (503, "too many 503 error responses")])
def test_a_server_that_stores_a_file_too_slowly_or_fails_is_not_called_silent(
    status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers an upload after the file is stored, in a bucket for example."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setattr(Slow, "status", status)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    uri = f"http://127.0.0.1:{server.server_port}"
    (tmp_path / "checkpoint.pt").write_bytes(b"weights")
    with pytest.raises(TrackingError) as caught, one_line_errors(uri):
        HttpArtifactRepository(f"{uri}/api/2.0/mlflow-artifacts/artifacts/r").log_artifact(str(tmp_path / "checkpoint.pt"))
    assert str(caught.value) == f"MLflow at {uri} cannot be used: {said}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("fault", ["no server", "no bucket", "no key"])
def test_a_bucket_that_takes_no_artifacts_is_one_line(fault: str, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of MLflow can tell its client to write artifacts to a bucket itself."""
    if fault == "no server":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    if fault == "no key":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    _cached_get_s3_client.cache_clear()
    (tmp_path / "checkpoint.pt").write_bytes(b"weights")
    for call in (lambda bucket: bucket.log_artifact(str(tmp_path / "checkpoint.pt")), lambda bucket: bucket.list_artifacts()):
        with (
            pytest.raises(TrackingError, match=r"^MLflow at sqlite:\S+ cannot be used: [^\n]+$"),
            one_line_errors(f"sqlite:///{tmp_path}/x.db"),
        ):
            call(S3ArtifactRepository("s3://nobodys-bucket/mlflow"))
    _cached_get_s3_client.cache_clear()


def test_no_process_finds_a_database_that_is_being_created(tmp_path: Path) -> None:
    uri, created = f"sqlite:///{tmp_path / 'mlflow.db'}", threading.Event()
    faults: list[TrackingError] = []

    def look() -> None:
        while not created.is_set():
            try:
                check_available(uri)
            except TrackingError as error:
                faults.append(error)

    watcher = threading.Thread(target=look)
    watcher.start()
    trackers = [_tracker(uri, tmp_path), _tracker(uri, tmp_path)]
    threads = [threading.Thread(target=tracker.load) for tracker in trackers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    created.set()
    watcher.join()
    assert faults == []
    assert [path.name for path in tmp_path.iterdir() if path.name != "mlflow.locks"] == ["mlflow.db"]
    assert trackers[0].begin_run("c", "identity", _spec()) == trackers[1].begin_run("c", "identity", _spec())


def test_a_database_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.write_bytes(b"not a database at all")
    with pytest.raises(TrackingError, match="cannot be used"):
        create_database(path, tmp_path / "lock")
    assert path.read_bytes() == b"not a database at all"


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a user who has no kept database yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/dml-repro"


def _new_database(folder: Path) -> tuple[set[str], dict[str, list[tuple[object, ...]]]]:
    """Create a project's database; return the names and columns of its tables and indexes, and all rows of tables that have some."""
    create_database(folder / "mlflow.db", folder / "lock")
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        kinds = dict(database.execute("SELECT name, type FROM sqlite_master WHERE sql IS NOT NULL"))
        columns = {f"{name} {database.execute(f'PRAGMA {kind}_xinfo({name})').fetchall()}" for name, kind in kinds.items()}
        rows = {name: database.execute(f"SELECT * FROM {name}").fetchall() for name, kind in kinds.items() if kind == "table"}
        return columns, {name: found for name, found in rows.items() if found}


def _count_migrations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    counted: list[object] = []
    migrate = utils._upgrade_db

    def count(engine: object) -> None:
        counted.append(engine)
        migrate(engine)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(utils, "_upgrade_db", count)
    return counted


def test_a_second_project_s_database_is_a_copy_without_migrations_and_with_its_own_place(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrations = _count_migrations(monkeypatch)
    first, second = (_new_database(tmp_path / name) for name in ("first", "second"))
    assert len(migrations) == len(list(user_cache.iterdir())) == 1
    assert first[0] == second[0]
    assert len(first[0]) > 50
    for name, (_, rows) in {"first": first, "second": second}.items():
        ((_, _, place, *_),) = rows.pop("experiments")
        assert place == f"{(tmp_path / name).as_uri()}/mlruns/0"
    assert first[1] == second[1]
    assert str(tmp_path).encode() not in next(user_cache.iterdir()).read_bytes()
    assert published_as(f"sqlite:///{tmp_path / 'second/mlflow.db'}") == (set(), set())


def test_a_copy_that_is_damaged_or_of_another_version_is_not_used(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_database(tmp_path / "first/mlflow.db", tmp_path / "lock")
    (copy,) = user_cache.iterdir()
    shutil.copy(copy, copy.with_name(copy.name.replace("mlflow-", "mlflow-1.")))
    DAMAGE["flip"](copy)
    migrations = _count_migrations(monkeypatch)
    _new_database(tmp_path / "second")
    assert len(migrations) == 1
    check_available(f"sqlite:///{tmp_path / 'second/mlflow.db'}")


def test_without_a_cache_that_can_be_written_a_database_is_created(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_cache.parent.write_text("a file, not a folder")
    migrations = _count_migrations(monkeypatch)
    _new_database(tmp_path / "first")
    assert len(migrations) == 1
