"""Start, check and stop the local stack. supervisor starts, watches and ends the processes; this module defines their order and setup.

`up` is idempotent: services that run and answer stay untouched. `down` leaves no process and no port, and keeps only the logs.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dml_core.errors import ConfigError, DmlError
from tasks.environment import Project, stack_text
from tasks.locks import alone
from tasks.stack.settings import MARK, RECORDS, S3, Service, Stack, load_stack, run_folder, write_private
from tasks.storage import make_bucket

UP_SECONDS = 240.0  # of services that start together; a busy machine takes ten times as long as an idle one
DOWN_SECONDS = 60.0
ASK_SECONDS = 2.0
SETUP_SECONDS = 180
TRIALS = 3
Say = Callable[[str], None]


class StackError(DmlError):
    """The stack does not start or end."""


@dataclass(frozen=True)
class Status:
    """State of a service: "up", "starting" (it runs but does not answer yet), "dead" or "down"."""

    name: str
    how: str
    pid: int | None
    address: str
    log: Path


def up(project: Project, say: Say, own_s3: str | None = None) -> Stack:
    """Start the services that do not run, in order, wait until all answer, and write the file that `dml` reads.

    Args:
        project: project of the stack.
        say: receives a line for each service that was started.
        own_s3: address of the user's own S3 server, to use instead of the stack's.

    Raises:
        StackError: a service ends or does not answer in time; the error names its log. Running services stay up for inspection.
        ConfigError: a required program is not installed, or the stack runs with another S3 server.
        StoreError: the bucket cannot be created.
    """
    with alone(project.state / ".stack.lock"):
        stack = load_stack(project, own_s3)
        _prepare(stack)
        if S3 not in stack.services:
            _make_bucket(stack)
        supervisor = _supervisor(stack)
        for level in stack.levels:
            until = time.monotonic() + UP_SECONDS
            fresh = [service for service in level if _start(supervisor, service)]
            for service in level:
                _wait(supervisor, service, until)
            for service in level:
                _set_up(stack, service)
            for service in fresh:
                say(f"{service.name}: up at {service.host}:{service.port}")
        write_private(stack.environment_file, stack_text(stack.clients))
    return stack


def status(project: Project) -> list[Status]:
    """Return the state of each service, without starting any."""
    stack = load_stack(project)
    found = {entry["name"]: entry for entry in _running(stack)}
    return [_status(stack, service, found.get(service.name)) for service in stack.services.values()]


def is_up(project: Project) -> bool:
    """Return whether a stack of this project was started and not stopped."""
    return (project.state / "stack" / "chosen.json").is_file()


def down(project: Project) -> int:
    """End all processes of the stack, remove its files except the logs, and return the number of processes killed.

    Raises:
        StackError: a process does not end.
    """
    folder, run = project.state / "stack", run_folder(project.state)
    with alone(project.state / ".stack.lock"):
        (folder / "env").unlink(missing_ok=True)
        if (supervisor := _spoken_to(run / "supervisor.sock")) is not None:
            supervisor.supervisor.shutdown()
        until = time.monotonic() + DOWN_SECONDS
        while (run / "supervisor.pid").exists() and _pid(run / "supervisor.pid") in psutil.pids() and time.monotonic() < until:
            time.sleep(0.1)
        num_killed = _end_left(folder, run)
        for name in ("chosen.json", "ray-token", "supervisor.conf", "*/set-up"):
            for path in folder.glob(name):
                path.unlink()
        shutil.rmtree(folder / RECORDS, ignore_errors=True)
        shutil.rmtree(run, ignore_errors=True)
    return num_killed


def processes_of(folder: Path, run: Path) -> list[psutil.Process]:
    """Return a stack's processes: they have its mark in their environment, or work in its folder (PostgreSQL and Ray overwrite theirs)."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _is_of(process, folder, run)]


def _is_of(process: psutil.Process, folder: Path, run: Path) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.environ().get(MARK) == str(folder):
            return True
        return Path(process.cwd()).is_relative_to(run) or any(str(run) in word for word in process.cmdline())
    except (psutil.Error, OSError):
        return False


def _end_left(folder: Path, run: Path) -> int:
    """Kill the processes the supervisor left: children of a killed worker, or all if the supervisor itself was killed."""
    left = processes_of(folder, run)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _, alive = psutil.wait_procs(left, timeout=10)
    if alive:
        raise StackError(f"processes of the stack cannot be stopped: {', '.join(str(process.pid) for process in alive)}")
    return len(left)


# ---------------------------------------------------------------- start


def _prepare(stack: Stack) -> None:
    """Create missing folders, PostgreSQL's cluster and Ray's token."""
    stack.run.mkdir(mode=0o755, parents=True, exist_ok=True)
    for service in stack.services.values():
        service.folder.mkdir(parents=True, exist_ok=True)
        service.log.touch()
    if not (stack.folder / "ray-token").is_file():
        write_private(stack.folder / "ray-token", stack.secrets["ray"])
    data = stack.run / "postgres"
    if not (data / "PG_VERSION").is_file():
        _make_cluster(stack, data, stack.services["postgres"].user)


def _make_cluster(stack: Stack, data: Path, user: str | None) -> None:
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(mode=0o700)
    word = stack.run / "word"
    write_private(word, stack.secrets["postgres"])
    if user is not None:
        shutil.chown(data, user, user)
        shutil.chown(word, user, user)
    command = [
        str(stack.postgresql / "initdb"),
        "-D",
        str(data),
        "-U",
        "dml",
        "--auth=scram-sha-256",
        f"--pwfile={word}",
        "-E",
        "UTF8",
        "-N",
    ]
    as_user: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    made = subprocess.run(
        command,
        cwd=stack.run,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
        **as_user,
    )
    word.unlink()
    if made.returncode != 0:
        raise StackError(f"initdb failed: {(made.stderr or made.stdout).strip().splitlines()[-1]}")


def _supervisor(stack: Stack) -> Any:
    """Return the stack's supervisor, starting it if it does not run."""
    if (running := _spoken_to(stack.socket)) is not None:
        return running
    for process in processes_of(stack.folder, stack.run):  # left by a killed supervisor
        with contextlib.suppress(psutil.Error):
            process.kill()
    config = stack.folder / "supervisor.conf"
    write_private(config, _config(stack))
    command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(config)]
    environment = stack.services["postgres"].environment
    started = subprocess.run(command, cwd=stack.root, env=environment, capture_output=True, text=True, check=False)
    until = time.monotonic() + 30
    while True:
        if (running := _spoken_to(stack.socket)) is not None:
            return running
        if started.returncode != 0 or time.monotonic() > until:
            raise StackError(f"supervisor does not start: {(started.stderr or started.stdout).strip()[-300:]}")
        time.sleep(0.1)


def _config(stack: Stack) -> str:
    """Return supervisor's configuration. It contains secrets in environments, so only the user may read it."""
    lines = [
        "[unix_http_server]",
        f"file={stack.socket}",
        "chmod=0700",
        "[supervisord]",
        f"logfile={stack.folder / 'supervisor.log'}",
        f"pidfile={stack.run / 'supervisor.pid'}",
        f"childlogdir={stack.folder}",
        *(["user=root"] if os.geteuid() == 0 else []),
        "[rpcinterface:supervisor]",
        "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface",
    ]
    for priority, level in enumerate(stack.levels):
        for service in level:
            lines += [
                f"[program:{service.name}]",
                f"command={_escaped(subprocess.list2cmdline(service.command))}",
                f"directory={stack.run if service.user else stack.root}",
                f"environment={_escaped(','.join(_entry(name, value) for name, value in _own(stack, service).items()))}",
                f"priority={priority}",
                "autostart=false",
                f"autorestart={str(service.restart).lower()}",
                "startsecs=1",
                "stopwaitsecs=8",
                "stopasgroup=true",
                "killasgroup=true",
                "redirect_stderr=true",
                f"stdout_logfile={service.log}",
                "stdout_logfile_maxbytes=20MB",
                "stdout_logfile_backups=1",
                *([f"user={service.user}"] if service.user else []),
            ]
    return "\n".join([*lines, ""])


def _own(stack: Stack, service: Service) -> dict[str, str]:
    """Return the variables that differ from the environment passed on by the supervisor."""
    passed = stack.services["postgres"].environment
    return {name: value for name, value in service.environment.items() if passed.get(name) != value}


def _entry(name: str, value: str) -> str:
    return f'{name}="{value}"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _start(supervisor: Any, service: Service) -> bool:
    """Start a service unless it runs; return whether it was started."""
    if supervisor.supervisor.getProcessInfo(service.name)["statename"] in ("STARTING", "RUNNING", "BACKOFF"):
        return False
    service.log.write_text("")
    supervisor.supervisor.startProcess(service.name, False)
    return True


def _wait(supervisor: Any, service: Service, until: float) -> None:
    """Wait until a service answers; supervisor restarts one that ends, for at most TRIALS starts."""
    seen: set[int] = set()
    while not answers(service):
        found = supervisor.supervisor.getProcessInfo(service.name)
        seen.add(found["pid"])
        if found["statename"] == "FATAL" or (found["statename"] == "EXITED" and not service.restart) or len(seen - {0}) > TRIALS:
            raise StackError(f"{service.name} ended ({found['spawnerr'] or found['description']}); see {service.log}")
        if time.monotonic() > until:
            raise StackError(f"{service.name} does not answer at {service.host}:{service.port}; see {service.log}")
        time.sleep(0.2)


def _set_up(stack: Stack, service: Service) -> None:
    """Set up a service once it answers: databases, a bucket, its commands."""
    if service.name == "postgres":
        _make_databases(stack)
    if service.name == S3:
        _make_bucket(stack)
    done = service.folder / "set-up"
    for command in () if done.exists() else service.setup:
        with service.log.open("a") as log:
            ran = subprocess.run(
                command, cwd=stack.root, env=service.environment, stdout=log, stderr=log, timeout=SETUP_SECONDS, check=False
            )
        if ran.returncode != 0:
            raise StackError(f"{service.name}: '{' '.join(command[1:])}' failed; see {service.log}")
    done.touch()


def _make_bucket(stack: Stack) -> None:
    login = {name.lower(): stack.clients[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    make_bucket(stack.bucket, login | {"endpoint_url": stack.clients["AWS_ENDPOINT_URL"]})


def _make_databases(stack: Stack) -> None:
    import psycopg2
    from psycopg2 import sql

    until = time.monotonic() + 30
    while True:
        try:
            connection = psycopg2.connect(
                host=stack.host, port=stack.ports["postgres"], user="dml", password=stack.secrets["postgres"], dbname="postgres"
            )
            break
        except psycopg2.OperationalError:
            if time.monotonic() > until:
                raise StackError(f"PostgreSQL refuses connections; see {stack.services['postgres'].log}") from None
            time.sleep(0.2)
    connection.autocommit = True
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute("SELECT datname FROM pg_database")
        found = {name for (name,) in cursor.fetchall()}
        for name in stack.databases:
            if name not in found:
                cursor.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))


# ---------------------------------------------------------------- questions


def answers(service: Service) -> bool:
    """Return whether a service answers at its port or, if it has one, its health page."""
    if service.health == "tcp":
        with contextlib.suppress(OSError), socket.create_connection((service.host, service.port), timeout=ASK_SECONDS):
            return True
        return False
    import requests

    try:
        return bool(requests.get(f"http://{service.host}:{service.port}{service.health}", timeout=ASK_SECONDS).ok)
    except requests.RequestException:
        return False


def _running(stack: Stack) -> Sequence[dict[str, Any]]:
    supervisor = _spoken_to(stack.socket)
    found: Sequence[dict[str, Any]] = [] if supervisor is None else supervisor.supervisor.getAllProcessInfo()
    return found


def _status(stack: Stack, service: Service, found: dict[str, Any] | None) -> Status:
    runs = found is not None and found["statename"] in ("RUNNING", "STARTING", "BACKOFF")
    if runs:
        how = "up" if answers(service) else "starting"
    else:
        how = "dead" if found is not None and found["statename"] in ("FATAL", "EXITED") else "down"
    return Status(service.name, how, found["pid"] if found is not None and runs else None, f"{service.host}:{service.port}", service.log)


def _spoken_to(path: Path) -> Any:
    """Return the supervisor that listens at a socket, or None."""
    try:
        from supervisor.xmlrpc import SupervisorTransport
    except ImportError:
        raise ConfigError("the local stack needs the packages supervisor and moto[server]; uv pip sync requirements.lock") from None
    proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=SupervisorTransport(None, None, f"unix://{path}"))
    try:
        proxy.supervisor.getState()
    except (OSError, xmlrpc.client.Error):
        return None
    return proxy


def _pid(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
