"""Reach MLflow: whether a server or a local database can be used, errors in one line, all pages of a search.

The check takes milliseconds and does not import MLflow, whose own client tries for minutes to reach a server or to open an unreadable file,
upgrades an older database without asking, and prints pages of traces for one of a newer version.
"""

import logging
import os
import re
import shlex
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from configparser import ConfigParser, Error
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from dml_core.errors import TrackingError
from dml_core.files import set_aside
from tasks.empty_databases import keep_empty_database, read_empty_database
from tasks.environment import answers, shown, without_secrets
from tasks.locks import alone

EXPERIMENT_PREFIX = "dml-repro/"  # of this project's experiments on a shared server
PROJECT_EXPERIMENTS = f"name LIKE '{EXPERIMENT_PREFIX}%'"  # MLflow's filter
SQLITE = "sqlite:///"
CONFIG = "config.yaml"  # among a run's artifacts: its settings
CREDENTIALS = "~/.mlflow/credentials"
Lock = Callable[[], AbstractContextManager[None]]
LOCKS = "mlflow.locks"  # folder in the state
MAX_METRICS_PER_BATCH = 1000  # of MLflow
OPEN_SECONDS = 10.0  # wait for another process that is writing
OF_ARTIFACTS = ("boto3", "botocore", "s3transfer", "azure", "google")  # libraries with which MLflow's client reaches artifacts by itself
TIMED_OUT = "timed out; if it stores large files slowly, increase MLFLOW_HTTP_REQUEST_TIMEOUT"
logger = logging.getLogger(__name__)
_CAUSES = re.compile(r"timed out|too many \d+ error responses|certificate verify failed")
_REVISION, _PREVIOUS = (re.compile(rf"^{name}\s*=\s*['\"](\w+)['\"]", re.MULTILINE) for name in ("revision", "down_revision"))


def check_available(uri: str) -> None:
    """Check that a server listens at an address, or that a local database is of this version of MLflow; other kinds are not checked.

    Raises:
        TrackingError: it cannot be used; the error says what to do.
    """
    if uri.startswith(SQLITE):
        check_database(Path(uri.removeprefix(SQLITE)))
    elif uri.startswith("http"):
        client_login()
        if not answers(uri):
            raise TrackingError(f"MLflow at {shown(uri)} cannot be used: no answer; start it, or correct MLFLOW_TRACKING_URI")


def client_login() -> tuple[str | None, str | None]:
    """Return the user and password that MLflow's client would send: of the variables, else of its file of credentials.

    Raises:
        TrackingError: the file cannot be parsed.
    """
    file = ConfigParser()
    try:
        file.read(os.path.expanduser(CREDENTIALS), encoding="utf-8")  # noqa: PTH111 - a container's user may have no home
        stored = [file.get("mlflow", f"mlflow_tracking_{name}", fallback=None) for name in ("username", "password")]
    except (Error, UnicodeError):  # whose text may have the password
        raise TrackingError(f"MLflow's {CREDENTIALS} cannot be used: cannot be parsed; in a value, write % as %%") from None
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD"))
    return user or stored[0], password or stored[1]


def check_database(path: Path) -> None:
    """Check a local database; a missing one is created on first use.

    Raises:
        TrackingError: it is damaged, not a file, or of another version of MLflow.
    """
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    where, remedy = f"MLflow's database {path} cannot be used", "restore a copy, or move it away and publish again with dml reproduce"
    if not path.is_file():
        raise TrackingError(f"{where}: it is not a file; move it away")
    try:
        with closing(open_database(path)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            revision = database.execute("SELECT version_num FROM alembic_version").fetchone() if "alembic_version" in tables else None
    except sqlite3.Error as error:
        raise TrackingError(f"{where}: {error}; {remedy}") from None
    if tables and revision is None:
        raise TrackingError(f"{where}: it is not an MLflow database or incomplete; {remedy}")
    known, newest = schemas()
    if revision is not None and revision[0] != newest:
        if revision[0] in known:
            raise TrackingError(f"{where}: an older MLflow wrote it; back it up, then: mlflow db upgrade {shlex.quote(f'{SQLITE}{path}')}")
        raise TrackingError(f"{where}: a newer MLflow wrote it; install that version, or set MLFLOW_TRACKING_URI to another database")


def check_place(uri: str, experiment: Any, folder: Path) -> None:
    """Check that a local database writes an experiment's files into a folder, whose absolute path it has had since it was created.

    Raises:
        TrackingError: it would write to another one: the project was moved, or another program created the experiment.
    """
    used = Path(url2pathname(urlsplit(experiment.artifact_location).path))
    if used.resolve() != folder.resolve():
        moved = "the project was moved; move it back, or move the database away and publish again with dml reproduce"
        created = "another program created it; rename it in MLflow, then dml reproduce"
        raise TrackingError(
            f"MLflow's database {uri.removeprefix(SQLITE)} writes the files of {experiment.name} to {used}, not to {folder}: "
            f"{moved if used.parts[-2:] == folder.parts[-2:] else created}"
        )


def create_database(path: Path, lock: Path) -> None:
    """Create a local database unless there is one: under another name, so that no process finds one with a part of its tables.

    Raises:
        TrackingError: it cannot be created.
    """
    with alone(lock), one_line_errors(f"{SQLITE}{path}"):
        if path.exists() and path.stat().st_size:
            return
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            new = Path(folder) / path.name
            for suffix in ("-journal", "-wal"):  # of a database that was moved away: SQLite would apply it to the new one
                if (left := path.with_name(f"{path.name}{suffix}")).exists():
                    logger.warning("%s: of a database that is gone; kept as %s", left, set_aside(left).name)
            _create_tables(new)
            artifacts = (path.parent / "mlruns").absolute().as_uri()  # MLflow writes it into SQL as it is: a path may have an apostrophe
            store = SqlAlchemyStore(f"{SQLITE}{new}", artifacts)  # type: ignore[no-untyped-call]
            store.engine.dispose()
            new.replace(path)


def _create_tables(path: Path) -> None:
    """Write a new database without an experiment: a copy of this user's empty one of the installed MLflow, else by all migrations."""
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    name = f"mlflow-{version('mlflow')}-{schemas()[1]}"
    data = read_empty_database(name)
    if data is not None:
        path.write_bytes(data)
        return
    engine = create_sqlalchemy_engine(f"{SQLITE}{path}")  # type: ignore[no-untyped-call]
    _initialize_tables(engine)  # type: ignore[no-untyped-call]
    engine.dispose()
    keep_empty_database(name, path)


def database_lock(uri: str, state: Path) -> Lock:
    """Return the lock that each call to a local database holds, as SQLite allows one writer at a time; a server needs none."""
    return partial(alone, state / LOCKS / "database") if uri.startswith(SQLITE) else nullcontext


def open_client(uri: str, state: Path) -> Any:
    """Return MLflow's client; a missing local database is created first."""
    from mlflow import MlflowClient

    if uri.startswith(SQLITE):
        create_database(Path(uri.removeprefix(SQLITE)), state / LOCKS / "creation")
    # MLFLOW_REGISTRY_URI would name another registry than the one that is read
    return LockingClient(MlflowClient(uri, registry_uri=uri), database_lock(uri, state))


def open_database(path: Path) -> sqlite3.Connection:
    """Open an existing local database without MLflow; SQLite takes back what a killed process had not committed, which writes to it."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=OPEN_SECONDS)


@cache
def schemas() -> tuple[frozenset[str], str]:
    """Return the revisions of the database's tables that the installed MLflow knows, and the newest."""
    spec = find_spec("mlflow")
    assert spec is not None
    assert spec.origin is not None
    migrations = [path.read_text(encoding="utf-8") for path in (Path(spec.origin).parent / "store/db_migrations/versions").glob("*.py")]
    known = frozenset(revision[1] for text in migrations if (revision := _REVISION.search(text)))
    (newest,) = known - {previous[1] for text in migrations if (previous := _PREVIOUS.search(text))}
    return known, newest


@contextmanager
def one_line_errors(uri: str) -> Iterator[None]:
    """Raise every error of MLflow in one line, at once if no server answers.

    Raises:
        TrackingError: that line.
    """
    check_available(uri)
    from alembic.util.exc import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except Exception as error:
        of_mlflow = isinstance(error, (MlflowException, SQLAlchemyError, CommandError, OSError))
        if not of_mlflow and type(error).__module__.partition(".")[0] not in OF_ARTIFACTS:
            raise
        reason = (without_secrets(str(error)).strip() or type(error).__name__).splitlines()[0]
        if "Max retries exceeded" in reason:  # its cause is at the end of a long line
            cause = _CAUSES.search(reason)
            reason = "no answer" if cause is None else cause[0].replace("timed out", TIMED_OUT)
        what = "refuses a value" if getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE" else "cannot be used"
        raise TrackingError(f"MLflow at {shown(uri)} {what}: {reason[:200]}") from None


def check_listed(uri: str, client: Any, run: Any) -> None:
    """Check that the settings of a published run are listed here if MLflow's server lists them: this machine's S3 may be another one.

    Raises:
        TrackingError: they are not, or the server cannot tell; nothing was deleted.
    """
    run_id, place = run.info.run_id, str(run.info.artifact_uri)
    if uri.startswith(SQLITE) or place.startswith("mlflow-artifacts:"):
        return  # listed by the server itself
    if CONFIG not in {entry.path for entry in client.list_artifacts(run_id)} and may_have(uri, run_id, CONFIG):
        raise TrackingError(
            f"MLflow at {shown(uri)}: the files of run {run_id} in {shown(place)} cannot be seen with this machine's AWS_ENDPOINT_URL and "
            "key; set those of its bucket"
        )


def may_have(uri: str, run_id: str, name: str) -> bool:
    """Return whether MLflow's server, asked by its own key, lists a file at the top of a run's artifacts, or cannot tell."""
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    login: Any = get_default_host_creds(uri)  # type: ignore[no-untyped-call]
    place = "/api/2.0/mlflow/artifacts/list"
    answer: Any = http_request(login, place, "GET", params={"run_id": run_id})  # type: ignore[no-untyped-call]
    return answer.status_code != 200 or name in {entry["path"] for entry in answer.json().get("files", [])}


def project_runs(client: Any, tags: Mapping[str, str | None], **options: Any) -> list[Any]:
    """Return the runs of this project's experiments that have these tags, newest first; `options` are those of `search_runs`."""
    experiments = all_pages(partial(client.search_experiments, filter_string=PROJECT_EXPERIMENTS))
    return runs_in(client, [experiment.experiment_id for experiment in experiments], tags, **options)


def runs_in(client: Any, experiments: Sequence[str], tags: Mapping[str, str | None], **options: Any) -> list[Any]:
    """Return the runs of these experiments that have these tags, as `project_runs`."""
    return all_pages(partial(client.search_runs, experiments, tag_filter(tags), **options)) if experiments else []


def tag_filter(tags: Mapping[str, str | None]) -> str:
    """Return MLflow's filter for runs with these tags; None is any value."""
    return " and ".join(f"tags.`{name}` " + ("LIKE '%'" if value is None else f"= '{value}'") for name, value in tags.items())


def all_pages(search: Callable[..., Any]) -> list[Any]:
    """Return all results of one of MLflow's searches, which returns at most 1000 at a time."""
    results: list[Any] = []
    token = None
    while True:
        page = search(max_results=1000, page_token=token)
        results += page
        token = page.token
        if not token:
            return results


def log_metrics(client: Any, run_id: str, metrics: Sequence[Any]) -> None:
    """Log any number of MLflow's `Metric`."""
    for start in range(0, len(metrics), MAX_METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + MAX_METRICS_PER_BATCH])


def set_tags(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    """Set all tags of a run in one call."""
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])


class LockingClient:
    """MLflow's client with a lock around each call: SQLite refuses some of 16 writing threads ("database is locked").

    Uploads do not take the lock: their bytes do not go to the database.
    """

    UPLOADS = frozenset({"log_artifact", "log_artifacts", "log_text"})

    def __init__(self, client: Any, lock: Lock) -> None:
        self._client, self._lock = client, lock

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name in self.UPLOADS:
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock():
                return method(*arguments, **options)

        return call
