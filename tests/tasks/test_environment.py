"""Addresses and texts shown without secrets, and the environment of every process."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray
import requests
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
from ray._private.utils import validate_socket_filepath
from sqlalchemy.engine import make_url

from dml_core.data.readers.shared.packages import cache_folder
from dml_core.errors import ConfigError, StoreError
from tasks import doctor, environment
from tasks.checks import check_places
from tasks.environment import (
    PLACES,
    Project,
    answers,
    find_project,
    finished_records,
    memory_bytes,
    num_cores,
    open_project,
    overridden,
    prefect_server,
    ray_cluster,
    ray_folder,
    set_environment,
    shown,
    stack_environment,
    stack_text,
    without_secrets,
)
from tasks.files import write_whole
from tasks.runs.specs import ScaleSpec
from tasks.tracking.published import published_as
from tasks.tracking.tags import Tag
from tasks.workers.connection import connect
from tests.conftest import ROOT
from tests.damage import DAMAGE


def test_an_address_is_shown_without_its_user_and_query() -> None:
    assert shown("postgresql+psycopg2://u:p@h:1/db?sslkey=k") == "postgresql+psycopg2://h:1/db"
    assert shown("s3://bucket/prefix") == "s3://bucket/prefix"
    assert shown("sqlite:////srv/state/mlflow.db") == "sqlite:////srv/state/mlflow.db"
    assert shown("h:6379") == "h:6379"
    assert shown("http://u:p@[::1?token=t") == "http://[::1"
    for password in ("pa#ss", "pa?ss", "pa/ss", "1/2#@"):
        assert shown(f"http://u:p{password}@h:1/a") == "http://h:1/a", "letters that an address should have encoded"
    assert shown("postgresql+psycopg2://u:12/3@h/db") == "postgresql+psycopg2://h/db"
    for address in ("http://h:1/p@th", "http://[::1]:5000/p@th", "http://h/p@th"):
        assert shown(address) == address
    assert shown("http://u@h/p@th") == "http://h/p@th"


@pytest.mark.parametrize("address", ["ray-head:66379", "ray-head:637x", "[::1", "http://[::1", "http://localhost:70000/api"])
def test_an_address_that_is_mistyped_does_not_answer(address: str) -> None:
    assert not answers(address)


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="?")).map("/home/".__add__))
def test_a_path_is_shown_whole(path: str) -> None:
    assert shown(path) == path
    assert shown(f"sqlite:///{path}") == f"sqlite:///{path}"
    assert shown(f"sqlite:///{path}?key=word") == f"sqlite:///{path}"


def test_a_text_of_others_is_shown_without_the_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_SECRET_ACCESS_KEY": "planted-s3",
        "PREFECT_API_AUTH_STRING": "admin:planted-prefect",
        "MLFLOW_TRACKING_URI": "postgresql://dml:planted-database@db/mlflow",
        "RAY_AUTH_TOKEN": "1",
        "RAY_AUTH_MODE": "token-of-no-secret",
    }.items():
        monkeypatch.setenv(name, value)
    said = "to postgresql://dml:planted-database@db/mlflow; planted-s3, admin:planted-prefect, planted-prefect, planted-database"
    assert without_secrets(said) == "to postgresql://db/mlflow; ***, ***, ***, ***"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:12/3@host")
    said = "no answer of http://user:{}host/api, step 12/30"
    assert without_secrets(said.format("12/3@")) == said.format("***@"), "a password too short to be hidden in any text"
    signed = "weights 'https://{}bucket/w.pth{}' are others (https://{}bucket/a{}); https://bucket/b{}; is it http://host/c? yes"
    query = "?X-Amz-Credential=AKIA&X-Amz-Signature=0a1b"
    assert without_secrets(signed.format("a:b@", query, "", query, query)) == signed.format(*[""] * 5)
    plain = "step 1 of 10: token-of-no-secret, mail@example.org, https://example.org/@page"
    assert without_secrets(plain) == plain


def test_libraries_are_made_to_load_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD", None)
    set_environment(Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "sqlite:///x"))
    assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"


def test_mlflow_has_as_long_to_store_a_file_as_by_its_own_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers an upload after it has stored the file."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("MLFLOW_HTTP_REQUEST_TIMEOUT", None)
    set_environment(Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "sqlite:///x"))
    assert MLFLOW_HTTP_REQUEST_TIMEOUT.get() >= MLFLOW_HTTP_REQUEST_TIMEOUT.default


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in the working directory, with an environment that is restored after the test."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("DML_") and name not in PLACES}
    monkeypatch.setattr(os, "environ", others)
    (tmp_path / "params.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["DML_STATE", "DML_STORE", "DML_TUNING_STORAGE", *PLACES])
def test_an_empty_variable_is_unset(name: str, inside: Path) -> None:
    os.environ[name] = ""
    project = open_project()
    assert os.environ.get(name) != ""
    assert (project.state, project.store) == (inside / "state", str(inside / "state/store"))
    assert project.tracking_uri == f"sqlite:///{inside}/state/mlflow.db"


def test_a_state_folder_that_no_database_address_can_name_is_refused(inside: Path) -> None:
    os.environ["DML_STATE"] = str(inside / "what?")
    with pytest.raises(ConfigError, match="a SQLite address cannot contain"):
        find_project()
    os.environ["DML_STATE"] = str(inside / "a b#ü%41")
    assert find_project().state == inside / "a b#ü%41"


def test_a_folder_of_prefect_that_cannot_be_written_is_named(inside: Path) -> None:
    os.environ["PREFECT_HOME"] = "/proc/prefect"
    with pytest.raises(StoreError, match=r"^/proc/prefect: cannot be written .*; set DML_STATE or PREFECT_HOME to a writable folder"):
        open_project()


def test_a_user_without_a_home_gets_one_in_the_state_folder(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user who is in no password file, without HOME; libraries would write into a folder named `~`."""
    for name in ("HOME", "XDG_CACHE_HOME", "PREFECT_LOCAL_STORAGE_PATH"):
        os.environ.pop(name, None)
    known = Path.home()
    open_project()
    assert Path.home() == known
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    finished = finished_records()
    open_project()
    assert Path.home() == inside / "state/home"
    assert finished_records() == finished == inside / "state/prefect/storage"
    assert cache_folder() == inside / "state/home/.cache/dml-repro"


def test_only_cores_that_this_process_may_use_count() -> None:
    """A job of a scheduler with one core of a node placed as many runs as the node has cores."""
    code = "from tasks.environment import num_cores; print(num_cores())"
    core = min(os.sched_getaffinity(0))
    ran = subprocess.run(["taskset", "-c", str(core), sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "1\n"


@pytest.mark.parametrize(
    ("quota", "allowed"), [("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("max 100000", 4), ("", 4)]
)
def test_a_container_s_quota_limits_the_cores(quota: str, allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, second = quota.replace("max", "-1").partition(" ")
    of_version_1 = {"cpu/cpu.cfs_quota_us": first + "\n", "cpu/cpu.cfs_period_us": second + "\n"}
    for files in ({"cpu.max": quota}, of_version_1):

        def read_text(path: Path, encoding: str, files: dict[str, str] = files) -> str:
            if (name := str(path.relative_to("/sys/fs/cgroup"))) not in files:
                raise FileNotFoundError(name)
            return files[name]

        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
        monkeypatch.setattr(Path, "read_text", read_text)
        assert num_cores() == allowed


@pytest.mark.parametrize("name", ["DML_STATE", "DML_STORE", "DML_WEIGHTS", "PREFECT_HOME", "TORCH_HOME"])
def test_a_relative_folder_is_the_same_for_processes_with_another_working_directory(
    name: str, inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ[name] = "own"
    first = open_project()
    (inside / "sub").mkdir()
    monkeypatch.chdir(inside / "sub")  # as DVC and Ray's workers have another one
    assert os.environ[name] == str(inside / "own")
    assert find_project() == first


@pytest.mark.parametrize(
    ("named", "used"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": ".example.org,localhost"}, ".example.org,localhost,127.0.0.1,::1"),
        ({"no_proxy": "a,b", "NO_PROXY": "c"}, "a,b,127.0.0.1,localhost,::1"),
    ],
)
def test_servers_of_this_machine_are_not_looked_for_behind_a_proxy(named: dict[str, str], used: str, inside: Path) -> None:
    os.environ |= {"http_proxy": "http://proxy.example.org:3128"} | named
    for _ in range(2):  # a command and those that it starts
        open_project()
        assert os.environ["no_proxy"] == used
    assert requests.utils.should_bypass_proxies("http://127.0.0.1:4200/api", None)
    assert requests.utils.should_bypass_proxies("http://[::1]:4200/api", None)


def test_a_server_behind_a_proxy_answers_if_the_proxy_does(inside: Path) -> None:
    """Its clients connect to the proxy; the server itself may have a name that only the proxy knows."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        os.environ["http_proxy"] = f"http://user:password@127.0.0.1:{proxy.getsockname()[1]}"
        assert answers("http://mlflow.example.invalid:5000")
        assert not answers("https://mlflow.example.invalid:5000"), "no proxy for https"
        os.environ["no_proxy"] = ".example.invalid"
        assert not answers("http://mlflow.example.invalid:5000")
        del os.environ["no_proxy"]
    assert not answers("http://mlflow.example.invalid:5000"), "the proxy is down"


def test_a_server_that_is_asked_has_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        assert answers(address)
        assert not answers(address, is_asked=True)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert answers(f"http://127.0.0.1:{server.server_port}/api", is_asked=True), "whatever it answers"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory.max": "max\n"}, None),
        ({"memory.max": "1073741824\n"}, 1 << 30),
        ({"memory/memory.limit_in_bytes": "1073741824\n"}, 1 << 30),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_a_container_s_limit_is_its_memory(files: dict[str, str], limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path, encoding: str) -> str:
        found = files.get(str(path.relative_to("/sys/fs/cgroup")))
        if found is None:
            raise FileNotFoundError(path)
        return found

    monkeypatch.setattr(Path, "read_text", read_text)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_bytes() == (limit or machine)


JOB = "system.slice/slurmstepd.scope/job_7"  # with a limit, around its steps without one


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (
            f"0::/{JOB}/step_batch/user/task_0\n",
            {f"{JOB}/memory.max": "1073741824", f"{JOB}/cpu.max": "200000 100000", f"{JOB}/step_batch/memory.max": "max"},
        ),
        (
            f"9:cpu,cpuacct:/{JOB}/step_batch\n4:memory:/{JOB}/step_batch\n0::/\n",
            {
                f"memory/{JOB}/memory.limit_in_bytes": "1073741824",
                f"memory/{JOB}/step_batch/memory.limit_in_bytes": "9223372036854771712",
                f"cpu/{JOB}/cpu.cfs_quota_us": "200000",
                f"cpu/{JOB}/cpu.cfs_period_us": "100000",
            },
        ),
    ],
)
def test_the_limits_of_a_job_or_a_service_count(groups: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job of 1 GB on a node of 500 GB `dml plan` said that a training of 100 GB fits."""
    texts = {Path("/proc/self/cgroup"): groups} | {Path("/sys/fs/cgroup", name): text for name, text in files.items()}

    def read_text(path: Path, encoding: str) -> str:
        if path not in texts:
            raise FileNotFoundError(path)
        return texts[path]

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(Path, "read_text", read_text)
    assert (memory_bytes(), num_cores()) == (1 << 30, 2)


def test_a_job_of_slurm_that_is_bound_to_no_cores_uses_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert num_cores() == 1


def test_a_home_in_a_folder_s_name_is_replaced(inside: Path) -> None:
    os.environ |= {"HOME": str(inside), "DML_STORE": "~/runs", "DML_STATE": "~/of runs"}
    assert (find_project().store, find_project().state) == (str(inside / "runs"), inside / "of runs")
    os.environ["DML_STORE"] = "~nobody-here/runs"
    assert find_project().store == str(inside / "~nobody-here/runs")


@pytest.mark.parametrize("address", ["gs://bucket/x", "s3:/bucket/x", "S3://bucket/x", "file:///tmp/x", "https://user:word@host/x"])
def test_a_store_of_another_kind_is_no_folder(address: str, inside: Path) -> None:
    os.environ["DML_STORE"] = address
    named = address.replace("user:word@", "")
    with pytest.raises(ConfigError, match=f"DML_STORE: '{named}' is neither a folder nor s3://bucket/prefix") as caught:
        find_project()
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("address", ["mlruns", "./mlruns", "/srv/mlruns", "file:///srv/mlruns", "server:5000"])
def test_a_folder_is_no_address_of_mlflow(address: str, inside: Path) -> None:
    """It was MLflow's default, and other programs set it; MLflow refuses it after the first training."""
    os.environ["MLFLOW_TRACKING_URI"] = address
    with pytest.raises(ConfigError, match=f"MLFLOW_TRACKING_URI: '{address}' is neither http://SERVER nor sqlite.*unset it"):
        find_project()


IN_MEMORY = ["sqlite://", "sqlite:///", "sqlite:///:memory:"]
WITH_DRIVER = [
    "sqlite+pysqlite:///runs.db",
    "sqlite+pysqlite:////srv/runs.db",
    "SQLITE:///runs.db",
    "sqlite://localhost/runs.db",
    " sqlite:///runs.db",
]
WITH_OPTIONS = [
    "sqlite:///runs.db?timeout=30",
    "sqlite:////srv/runs.db?mode=ro&uri=true",
    "sqlite:///file:runs.db?uri=true",
    "sqlite:///what?/runs.db",
]


@pytest.mark.parametrize("address", [*IN_MEMORY, *WITH_DRIVER, *WITH_OPTIONS, "FILE:///srv/mlruns", "sqlite:runs.db"])
def test_an_address_that_mlflow_and_the_project_would_read_differently_is_refused(address: str, inside: Path) -> None:
    """With options `dml gc --delete` would have removed all runs that only MLflow shows."""
    os.environ["MLFLOW_TRACKING_URI"] = address
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI: '[^\n]+; (unset|remove)[^\n]+$"):
        find_project()


def test_a_relative_database_in_a_folder_that_no_address_can_name_is_refused(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (inside / "what?").mkdir()
    monkeypatch.chdir(inside / "what?")
    os.environ["MLFLOW_TRACKING_URI"] = "sqlite:///runs.db"
    with pytest.raises(ConfigError, match=r"what\?/runs.db': options and '\?' are not supported"):
        find_project()


@pytest.mark.parametrize(
    "name", ["runs.db", "{}/runs.db", "/{}/runs.db", "a b.db", "a%20b.db", "a#b.db", "a;b'c.db", "ü.db", "C:a.db", "file:a.db"]
)
def test_mlflow_and_the_project_read_the_same_file(name: str, inside: Path, mlflow_database: Path) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = address = f"sqlite:///{name.format(inside)}"
    shutil.copy(mlflow_database, inside / str(make_url(address).database))
    client = MlflowClient(address)
    client.create_run(client.create_experiment("dml-repro/d"), tags={Tag.IDENTITY: "shown"})
    assert published_as(find_project().tracking_uri) == ({"shown"}, set())


def test_a_login_without_http_is_not_printed(inside: Path) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = "ann:planted-secret@server:5000"
    with pytest.raises(ConfigError, match="'server:5000' is neither"):
        find_project()


def test_a_relative_database_of_mlflow_is_the_same_for_all_processes(inside: Path) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = "sqlite:///own.db"
    assert open_project().tracking_uri == os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{inside}/own.db"
    os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:5000/mlflow"
    assert find_project().tracking_uri == "http://127.0.0.1:5000/mlflow"


def test_finding_a_project_changes_no_variable_and_opening_it_sets_the_stack_s(inside: Path) -> None:
    values = {"DML_STORE": "s3://dml/store", "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000", "PREFECT_API_URL": "http://127.0.0.1:4200/api"}
    write_whole(inside / "state/stack/env", stack_text(values))
    os.environ["DML_STORE"], os.environ["MLFLOW_TRACKING_URI"] = "own", ""
    before = dict(os.environ)
    project = find_project()
    assert (project.store, project.tracking_uri) == (str(inside / "own"), values["MLFLOW_TRACKING_URI"])
    assert os.environ == before
    assert open_project() == project
    assert {name: os.environ[name] for name in values} == values | {"DML_STORE": str(inside / "own")}
    assert (overridden(values), prefect_server()) == (["DML_STORE"], values["PREFECT_API_URL"])


@pytest.mark.parametrize(
    ("own", "is_given"),
    [
        (None, True),
        ("", True),
        ("http://127.0.0.1:4200/api", True),
        ("http://localhost:4200/api/", True),
        ("http://localhost.team:4200/api", False),
        ("http://localhost:4201/api", False),
        ("https://team/api", False),
    ],
)
def test_the_stack_s_login_is_not_sent_to_another_server_of_prefect(own: str | None, is_given: bool, inside: Path) -> None:
    """There it would be shown to others, and take the place of `PREFECT_API_KEY`."""
    values = {"PREFECT_API_URL": "http://127.0.0.1:4200/api", "PREFECT_API_AUTH_STRING": "dml:planted"}
    write_whole(inside / "state/stack/env", stack_text(values))
    if own is not None:
        os.environ["PREFECT_API_URL"] = own
    open_project()
    assert (os.environ.get("PREFECT_API_AUTH_STRING") == "dml:planted") == is_given
    assert overridden(stack_environment(inside / "state")) == ([] if own in (None, "", values["PREFECT_API_URL"]) else ["PREFECT_API_URL"])


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_settings_of_the_stack_are_refused_and_none_are_none(inside: Path, how: str) -> None:
    """Continuing with this machine's defaults would write to other servers than the stack's."""
    path = inside / "state/stack/env"
    assert stack_environment(inside / "state") == {}
    values = {"DML_STORE": "s3://dml/store", "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"}
    write_whole(path, stack_text(values))
    assert stack_environment(inside / "state") == values
    DAMAGE[how](path)
    if how == "remove":
        assert stack_environment(inside / "state") == {}
        return
    with pytest.raises(StoreError, match=r"stack/env: damaged.*dml stack up"):
        find_project()


def test_a_shell_reads_the_settings_of_the_stack_as_the_commands_do(inside: Path) -> None:
    """Folders have spaces, and secrets of one's own S3 server any letters."""
    path = inside / "a b" / "stack/env"
    values = {"PLACE": str(path), "SECRET": """a'b"c$HOME&`d`#e = \\ü""", "EMPTY": "", "URL": "http://127.0.0.1:5000/?a=1"}
    write_whole(path, stack_text(values))
    assert stack_environment(inside / "a b") == values
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    command = f'set -a; . "$1"; exec {sys.executable} -c "{code}"'
    printed = subprocess.run(["sh", "-c", command, "sh", str(path)], env={}, capture_output=True, text=True, check=True).stdout
    assert {name: value for name, value in json.loads(printed).items() if name in values} == values


def test_the_stack_of_another_user_is_not_called_damaged(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings have passwords, which only the user who started it can read; root, who runs the tests, can read all files."""
    write_whole(inside / "state/stack/env", stack_text({}))

    def refuses(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuses)
    with pytest.raises(StoreError, match=r"stack/env: cannot be read; it is of the user who started the stack"):
        stack_environment(inside / "state")


@pytest.mark.parametrize(("length", "folder"), [(39, None), (40, "/tmp")])
def test_ray_s_sockets_have_short_paths(length: int, folder: str | None, inside: Path) -> None:
    os.environ["TMPDIR"] = "/" + "t" * (length - 1)
    open_project()
    assert os.environ.get("RAY_TMPDIR") == folder
    used = folder or os.environ["TMPDIR"]
    socket = f"{used}/ray/session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{2**22}/sockets/plasma_store"  # 2**22: the largest process id
    validate_socket_filepath(socket)


def test_each_flow_has_a_folder_of_its_own_for_ray_unless_its_path_would_be_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    first = ray_folder()
    assert first is not None
    second = ray_folder()  # of a flow within a flow
    assert second is not None
    assert second.is_relative_to(first)
    assert os.environ["RAY_TMPDIR"] == str(second)
    shutil.rmtree(first)
    for within in (str(tmp_path / ("t" * 30)), str(first)):
        monkeypatch.setenv("RAY_TMPDIR", within)
        assert ray_folder() is None, "too long, and missing"
        assert os.environ["RAY_TMPDIR"] == within
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ray_folder() is None


CLUSTERS = {None: None, "": None, "local": None, "10.0.0.1:6379": "10.0.0.1:6379", "auto": "auto"}


@pytest.mark.parametrize("address", CLUSTERS)
def test_a_ray_on_this_machine_is_bound_to_the_loopback(address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`local` is Ray's word for a cluster started on this machine."""
    ours = ("RAY_ADDRESS", "GLOO_SOCKET_IFNAME", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in ours})
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    set_environment(Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "sqlite:///x"))
    assert ray_cluster() == CLUSTERS[address]
    on_loopback = (os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"), os.environ.get("GLOO_SOCKET_IFNAME")) == ("0", "lo")
    assert on_loopback == (ray_cluster() is None)


def test_the_address_of_ray_client_is_refused_before_a_run(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs failed one after the other: Ray's client has no calls for the resources of the nodes."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://me:secret@head:10001")
    project = open_project()  # of commands that use no Ray
    for use in (connect, lambda: check_places(project, ScaleSpec())):
        with pytest.raises(
            ConfigError, match=r"RAY_ADDRESS: 'ray://head:10001' is for Ray Client; on a node of the cluster, set it to HEAD:6379"
        ):
            use()
    finding = doctor._ray(project)
    assert (finding.where, finding.status, finding.result) == ("ray://head:10001", "wrong", "an address of Ray Client")


STEPS = """
import numpy, resource
def num_page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    numpy.ones(5_000_000, numpy.float32)
step()
before = num_page_faults()
for _ in range(20):
    step()
print(num_page_faults() - before)
"""


@pytest.mark.parametrize("as_workers", [True, False])
def test_the_workers_allocator_keeps_the_memory_of_a_step_for_the_next(
    as_workers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 20 steps allocates 20 MB (4,883 pages) and frees them. Without the setting the system provides new pages for each step."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"})
    set_environment(Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "sqlite:///x"))
    assert os.environ["RAY_LD_PRELOAD_ON_WORKERS"] == "1"
    library = str(Path(ray.__file__).parent / "core" / "libjemalloc.so")
    preloaded = os.environ | {"LD_PRELOAD": library, "NUMPY_MADVISE_HUGEPAGE": "0"}
    if not as_workers:
        del preloaded["MALLOC_CONF"]
    done = subprocess.run([sys.executable, "-c", STEPS], env=preloaded, capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 4_900) == as_workers
