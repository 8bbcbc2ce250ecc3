"""`dml doctor`: check what is configured and whether it can be reached, and say what to do about problems.

Each check makes the smallest request that shows whether its subject works, within a few seconds. Nothing is started or changed, except that
a small file is written to the store, and to a bucket of MLflow's, and removed. The output contains no secrets: addresses are printed
without user and query, and the text of an answer is not repeated.
"""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from configparser import ConfigParser, Error
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Literal

import requests
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from dml_core.errors import DmlError, StoreError, TrackingError, first_line
from tasks.environment import STACK_ENV, Project, answers, login, overridden, prefect_server, ray_cluster, shown, stack_environment
from tasks.files import files_set_aside
from tasks.git import code_commit, trust_command
from tasks.runs.params.file import load_params
from tasks.runs.surroundings import MISSING, version_of
from tasks.stack.prefect_api import prefect_session
from tasks.storage import Store, open_store
from tasks.tables.alarms import ALARMS_FILE, last_verification, open_alarms
from tasks.tracking.connection import PROJECT_EXPERIMENTS, check_database, client_login, open_database
from tasks.tracking.outbox import OUTBOX
from tasks.wording import counted
from tasks.workers.placement import DEVICES, num_gpus

SECONDS = 5.0
RAY_SECONDS = 60
FREE_BYTES = 2 << 30
POOL = "dml"
INSTALL = "make -B .venv/.done; where an image is used, build it again"
NIGHT = timedelta(hours=26)  # as `report-missed-nights` in infra/automations.yaml
Status = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: name of what was checked.
        where: its place or address, without secrets.
        status: "note" marks a remark that stops nothing.
        result: what was found, versions included.
        remedy: what to do about it, or empty.
    """

    what: str
    where: str
    status: Status
    result: str
    remedy: str = ""


def examine(project: Project) -> list[Finding]:
    """Check everything that a flow of this project would use; call `set_environment` first."""
    checks = (_packages, _gpus, _parameters, _git, _state, _stack, _store, _mlflow, _outbox, _alarms, _prefect, _pool, _ray, _dvc_remote)
    return [check(project) for check in checks]


# ---------------------------------------------------------------- this machine


def _packages(project: Project) -> Finding:
    """Compare the installed versions with those that the project pins. Packages of an extra may be missing."""
    where = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    try:
        requirements = _requirements(project)
    except PackageNotFoundError:
        return Finding("packages", where, "wrong", "dml-repro is not installed", INSTALL)
    except tomllib.TOMLDecodeError as error:
        return Finding("packages", where, "wrong", f"pyproject.toml cannot be parsed ({error})", "git checkout HEAD pyproject.toml")
    installed, differing = dict[str, str](), []
    for requirement, is_needed in requirements:
        name, expected = requirement.name, requirement.specifier
        if not str(expected).startswith("=="):
            continue
        installed[name] = version_of(name)
        is_wrong = is_needed if installed[name] == MISSING else not expected.contains(installed[name])
        if is_wrong:
            differing.append(f"{name} is {installed[name]}, expected {str(expected).removeprefix('==')}")
    if differing:
        return Finding("packages", where, "wrong", "; ".join(differing), INSTALL)
    shown_names = ("prefect", "mlflow", "ray", "dvc", "torch")
    return Finding("packages", where, "ok", ", ".join(f"{name} {installed[name]}" for name in shown_names if name in installed))


def _requirements(project: Project) -> list[tuple[Requirement, bool]]:
    """Return each requirement, and whether it is needed without extras.

    A checkout's file has them: what is installed of an editable project are those of the time of its installation.
    """
    file = project.root / "pyproject.toml"
    metadata = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.is_file() else {}
    if metadata.get("name") != "dml-repro":
        found = map(Requirement, requires("dml-repro") or ())
        return [(line, line.marker is None or line.marker.evaluate({"extra": ""})) for line in found]
    extras = [line for lines in metadata["optional-dependencies"].values() for line in lines]
    return [(Requirement(line), True) for line in metadata["dependencies"]] + [(Requirement(line), False) for line in extras]


def _gpus(project: Project) -> Finding:
    """Report GPUs that the system has and torch cannot use: runs would train on the CPU."""
    try:
        number = num_gpus()
    except (ImportError, OSError) as error:
        return Finding("gpus", "", "wrong", f"torch cannot be imported ({first_line(error)})", INSTALL)
    if number:
        return Finding("gpus", "", "ok", counted(number, "GPU"))
    if not any(DEVICES.glob("nvidia[0-9]*")):
        return Finding("gpus", "", "ok", "none on this machine")
    remedy = "update NVIDIA's driver (`nvidia-smi` prints the version), or unset CUDA_VISIBLE_DEVICES"
    return Finding("gpus", str(DEVICES), "note", "torch can use none of this machine's GPUs; runs train on the CPU", remedy)


def _parameters(project: Project) -> Finding:
    where = str(project.params_file)
    try:
        params = load_params(project.params_file)
    except DmlError as error:
        return Finding("parameters", where, "wrong", str(error), "fix params.yaml")
    return Finding(
        "parameters", where, "ok", f"{counted(len(params.datasets), 'dataset')}, {counted(len(params.comparison.variants), 'variant')}"
    )


def _git(project: Project) -> Finding:
    where = str(project.root)
    if command := trust_command(project.root):
        return Finding("git", where, "note", "refuses this checkout, as another user owns it: results name no commit", command)
    return Finding("git", where, "ok", code_commit(project.root) or "no commit has this params.yaml: results name none")


def _state(project: Project) -> Finding:
    where = str(project.state)
    try:
        Store(where, project.state).check_writable()
    except StoreError:
        return Finding("state", where, "wrong", "cannot be written", "set DML_STATE to a writable folder")
    free = shutil.disk_usage(project.state).free
    if free < FREE_BYTES:
        return Finding("state", where, "wrong", f"{free / 1e9:.1f} GB free", "free up space: dml gc")
    return Finding("state", where, "ok", f"can be written, {free / 1e9:.0f} GB free")


def _stack(project: Project) -> Finding:
    where = str(project.state / STACK_ENV)
    named = stack_environment(project.state)
    if not named:
        return Finding("stack", where, "ok", "none: your own settings or the defaults for one machine are used")
    if names := overridden(named):
        return Finding("stack", where, "note", f"used except for {', '.join(names)}", "unset them to use the stack's")
    return Finding("stack", where, "ok", f"used for {', '.join(name for name in named if name in _ADDRESSES)}")


_ADDRESSES = ("DML_STORE", "MLFLOW_TRACKING_URI", "PREFECT_API_URL", "RAY_ADDRESS")


def _alarms(project: Project) -> Finding:
    """Report alarms that last, and a night without a verification if there was one before."""
    where, last = str(project.state / ALARMS_FILE), last_verification(project)
    try:
        lasting = open_alarms(project.state)
    except StoreError as error:
        fault, _, remedy = str(error).partition("; ")
        return Finding("verification", where, "wrong", fault, remedy)
    if lasting:
        return Finding("verification", where, "note", f"{counted(len(lasting), 'alarm')}; the first: {lasting[0].text}", lasting[0].remedy)
    if last is None:
        return Finding("verification", where, "ok", "no verification of accepted results yet")
    if datetime.now(UTC) - last > NIGHT:
        hours = (datetime.now(UTC) - last).total_seconds() / 3600
        result = f"the last one with a verdict began {hours:.0f} hours ago"
        return Finding("verification", where, "note", result, "look at the schedule's flow runs, or: dml verify")
    return Finding("verification", where, "ok", f"the last one began on {last:%Y-%m-%d %H:%M} UTC, without alarms")


def _outbox(project: Project) -> Finding:
    folder = project.state / OUTBOX
    num_waiting, num_damaged = len(list(folder.glob("*.json"))), len(files_set_aside(folder))
    if num_damaged:
        return Finding("outbox", str(folder), "note", counted(num_damaged, "damaged record"), "dml reproduce publishes their runs again")
    if num_waiting:
        return Finding("outbox", str(folder), "note", f"{counted(num_waiting, 'record')} not yet in MLflow", "dml sync")
    return Finding("outbox", str(folder), "ok", "no records wait for MLflow")


# ---------------------------------------------------------------- servers


def _store(project: Project) -> Finding:
    where = shown(project.store)
    store = open_store(project)
    endpoint = _s3_server()
    if store.is_remote and endpoint:
        where = f"{where} at {shown(endpoint)}"
        if not answers(endpoint, is_asked=True):
            return Finding("store", where, "wrong", "does not answer", "start the S3 server, or correct AWS_ENDPOINT_URL")
    try:
        store.check_writable()
    except StoreError:
        remedy = "check the bucket and the AWS_ credentials" if store.is_remote else "set DML_STORE to a writable folder or s3:// address"
        return Finding("store", where, "wrong", "cannot be written", remedy)
    if store.is_for_nodes:
        return Finding("store", where, "note", "a folder, which every node of the Ray cluster must reach", "or set DML_STORE to a bucket")
    return Finding("store", where, "ok", "can be written")


def _s3_server() -> str:
    """Return the address of the S3 server that boto3 and DVC use; empty for Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


def _mlflow(project: Project) -> Finding:
    uri = project.tracking_uri
    where = shown(uri)
    if not uri.startswith("http"):
        return _database(where, uri)
    url = uri.rstrip("/")
    try:
        user, password = client_login()
    except TrackingError as error:
        return Finding("mlflow", where, "wrong", *str(error).split("; "))
    headers = login(f"{user}:{password}" if user and password else None, os.environ.get("MLFLOW_TRACKING_TOKEN"))
    try:
        served = requests.get(f"{url}/version", timeout=SECONDS, headers=headers)
        search = f"{url}/api/2.0/mlflow/experiments/search"
        answer = requests.post(search, json={"max_results": 1, "filter": PROJECT_EXPERIMENTS}, timeout=SECONDS, headers=headers)
    except requests.RequestException:
        return Finding("mlflow", where, "wrong", "does not answer", "start it, or correct MLFLOW_TRACKING_URI; after runs: dml sync")
    remedy = "set MLFLOW_TRACKING_USERNAME and _PASSWORD, or _TOKEN" if answer.status_code == 401 else "add its host to --allowed-hosts"
    server = _server("mlflow", where, answer, served.text, if_refused=remedy, if_failed="check the server's log")
    bucket = re.search(r'"artifact_location": ?"(s3://[^"]+)"', answer.text)  # of the newest experiment: clients write its files themselves
    if bucket is not None and server.status == "ok":
        try:
            Store(bucket[1], project.state).check_writable()
        except StoreError:
            fault = f"this machine cannot write to {shown(bucket[1])}, where MLflow's files are"
            return Finding("mlflow", where, "wrong", fault, "set AWS_ENDPOINT_URL and the key of that bucket")
    return server


def _database(where: str, uri: str) -> Finding:
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///"):
        return Finding("mlflow", where, "note", "not checked: dml doctor checks only MLflow servers and SQLite databases")
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return Finding("mlflow", where, "ok", "missing or empty: the first run creates it")
    try:
        check_database(path)
        with closing(open_database(path)) as database:
            (integrity,) = database.execute("PRAGMA quick_check(1)").fetchone()
            (num_runs,) = database.execute("SELECT count(*) FROM runs WHERE lifecycle_stage = 'active'").fetchone()
    except TrackingError as error:
        fault, _, remedy = str(error).partition(" cannot be used: ")[2].partition("; ")
        return Finding("mlflow", where, "wrong", fault, remedy)
    except sqlite3.Error as error:
        return Finding("mlflow", where, "wrong", f"cannot be read: {error}", "restore a copy, or move it away and dml reproduce")
    if integrity != "ok":
        return Finding("mlflow", where, "wrong", "damaged", "restore a copy, or move it away and dml reproduce")
    return Finding("mlflow", where, "ok", f"a local database with {counted(num_runs, 'run')}")


def _prefect(project: Project) -> Finding:
    url = prefect_server()
    if url is None:
        return Finding("prefect", "", "ok", f"{version_of('prefect')}, each flow starts a temporary server")
    where = shown(url)
    try:
        answer = prefect_session().get(f"{url.rstrip('/')}/admin/version", timeout=SECONDS)
    except requests.RequestException:
        return Finding("prefect", where, "wrong", "does not answer", "start it, or unset PREFECT_API_URL")
    remedy = "set PREFECT_API_AUTH_STRING or PREFECT_API_KEY"
    return _server("prefect", where, answer, answer.text, if_refused=remedy, if_failed="PREFECT_API_URL has to end in /api")


def _pool(project: Project) -> Finding:
    """Check that a worker is online for scheduled flows. Without the pool, nothing can be scheduled, which is no fault."""
    url = prefect_server()
    if url is None:
        return Finding("schedules", "", "ok", "none without a Prefect server")
    try:
        answer = prefect_session().post(f"{url.rstrip('/')}/work_pools/{POOL}/workers/filter", json={}, timeout=SECONDS)
        if answer.status_code == 404:
            return Finding("schedules", f"work pool {POOL}", "note", "no such pool", f"prefect work-pool create {POOL} --type process")
        answer.raise_for_status()
        workers = answer.json()
    except requests.RequestException:
        return Finding("schedules", f"work pool {POOL}", "note", "unknown: Prefect refuses or does not answer")
    num_online = sum(worker.get("status") == "ONLINE" for worker in workers)
    if not num_online:
        return Finding("schedules", f"work pool {POOL}", "wrong", "no worker is online", f"prefect worker start --pool {POOL}")
    return Finding("schedules", f"work pool {POOL}", "ok", f"{num_online} of {len(workers)} workers online")


def _ray(project: Project) -> Finding:
    if (address := ray_cluster()) is None:
        return Finding("ray", "", "ok", f"{version_of('ray')}, each flow starts it on this machine")
    where = shown(address)
    if address.startswith("ray://"):
        return Finding("ray", where, "wrong", "an address of Ray Client", "set it to HEAD:6379, on a machine that is a node of the cluster")
    if not answers(address):
        return Finding("ray", where, "wrong", "does not answer", "start it, or unset RAY_ADDRESS to use one on this machine")
    try:
        client = subprocess.run(
            [sys.executable, "-c", _ASK_RAY], capture_output=True, text=True, timeout=RAY_SECONDS, check=False, env=os.environ | _QUIET
        )
    except subprocess.TimeoutExpired:
        return Finding("ray", where, "wrong", f"no answer in {RAY_SECONDS} s", "see the head node's log")
    printed = f"{client.stdout}{client.stderr}"
    if client.returncode == 0:
        if os.environ.get("RAY_AUTH_MODE") == "disabled" and not address.startswith(("127.", "localhost")):
            return Finding("ray", where, "wrong", "accepts jobs without authentication", "set RAY_AUTH_MODE=token and a token on all nodes")
        return Finding("ray", where, "ok", printed.strip().splitlines()[-1])
    if "ersion mismatch" in printed:
        return Finding("ray", where, "wrong", f"another version of Ray or Python than here (Ray {version_of('ray')})", "install the same")
    if "uthentication" in printed or "InvalidAuthToken" in printed:
        return Finding("ray", where, "wrong", "refuses the token", "set the cluster's RAY_AUTH_MODE and RAY_AUTH_TOKEN or _TOKEN_PATH")
    return Finding("ray", where, "wrong", "connection failed", "see `ray status` and the head node's log")


# In a separate process: a refusal ends the process of Ray's client, and only tasks/workers may import Ray.
_ASK_RAY = """
import logging, ray
ray.init(logging_level=logging.CRITICAL, log_to_driver=False)
alive = [node for node in ray.nodes() if node["Alive"]]
has = ray.cluster_resources()
parts = [f"{len(alive)} nodes", f"{has.get('CPU', 0):g} CPUs", f"{has.get('GPU', 0):g} GPUs"]
print(f"{ray.__version__}, {', '.join(parts)}")
"""
_QUIET = {"PYTHONWARNINGS": "ignore", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def _dvc_remote(project: Project) -> Finding:
    """Check DVC's default remote by its settings; DVC itself takes a second to load and reports no more."""
    config = ConfigParser(interpolation=None)
    files = [project.root / ".dvc" / name for name in ("config", "config.local")]
    try:
        config.read(files, encoding="utf-8")
    except Error:
        return Finding("dvc remote", str(files[0]), "wrong", "cannot be parsed", "fix it, or git checkout .dvc/config")
    name = config.get("core", "remote", fallback="")
    section = f"'remote \"{name}\"'"
    settings: Mapping[str, str] = config[section] if config.has_section(section) else {}
    url = settings.get("url", "")
    if not url:
        return Finding("dvc remote", "", "note", "none: packed datasets are on this machine only", "dvc remote add --default NAME URL")
    where = f"{name}: {shown(url)}"
    if "://" not in url:
        folder = (project.root / ".dvc" / url).resolve()
        parent = next(path for path in (folder, *folder.parents) if path.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            return Finding("dvc remote", where, "wrong", "cannot be written", "dvc remote modify its url")
        return Finding("dvc remote", where, "ok", "a folder" if folder.exists() else "a folder; the first dvc push creates it")
    server = settings.get("endpointurl") or _s3_server() if url.startswith("s3:") else url
    if not answers(server):
        return Finding("dvc remote", where, "wrong", f"{shown(server)} does not answer", "start it, or dvc remote modify")
    return Finding("dvc remote", where, "note", "login and content were not checked", "dvc status --cloud")


def _server(what: str, where: str, answer: requests.Response, version_text: str, if_refused: str, if_failed: str) -> Finding:
    """Judge a server's answer, and its version by its client's on this machine: newer clients send what an older server does not know."""
    if answer.status_code in (401, 403):
        return Finding(what, where, "wrong", f"refuses ({answer.status_code})", if_refused)
    if not answer.ok:
        return Finding(what, where, "wrong", f"answers with {answer.status_code}", if_failed)
    here = version_of(what)
    try:
        theirs = Version(version_text.strip().strip('"'))
    except InvalidVersion:
        return Finding(what, where, "wrong", "answers without a version", "check the address: another program may answer there")
    if here == MISSING or theirs > Version(here):
        return Finding(what, where, "note", f"the server has {theirs}, this machine has {here}")
    if theirs < Version(here):
        return Finding(what, where, "wrong", f"the server has {theirs}, this machine has {here}", f"upgrade the server to {here}")
    return Finding(what, where, "ok", f"{theirs}, the same as on this machine")
