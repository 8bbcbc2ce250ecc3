"""Start, check and stop the local stack. supervisor starts, watches and ends the processes; this module defines their order and setup.

`up` is idempotent: services that run and answer stay untouched. `restart` keeps their data. `down` leaves no process and no port, and keeps
only the logs.
"""

import contextlib
import hashlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import requests

from dml_core.config import read_yaml
from dml_core.errors import ConfigError, DmlError
from dml_core.files import json_sha256
from tasks import environment
from tasks.environment import STACK_ENV, Project, stack_text
from tasks.locks import alone
from tasks.stack.settings import CHOSEN, DATA, MARK, PASSED, RECORDS, S3, Service, Stack, load_stack, run_folder, write_private
from tasks.storage import make_bucket

UP_SECONDS = 240.0  # of services that start together; a busy machine takes ten times as long as an idle one
DOWN_SECONDS = 60.0
ASK_SECONDS = 2.0
SETUP_SECONDS = 180
OTHER_PORTS = "or choose other ports, which deletes the stack's data: dml stack down, then up"
RUNNING = ("STARTING", "RUNNING", "BACKOFF")  # supervisor's states of a process that it keeps running


class StackError(DmlError):
    """The stack does not start or end."""


@dataclass(frozen=True)
class Status:
    """A service's state: "up", "starting" (it runs but does not answer yet), "dead" or "down"; `pid` is None unless it runs."""

    name: str
    state: str
    pid: int | None
    address: str
    log: Path


def up(project: Project, report: Callable[[str], None], own_s3: str | None = None) -> Stack:
    """Start the services that do not run, in order, wait until all answer, and write the file that `dml` reads.

    `report` receives a line for each service that was started; `own_s3` is as in `load_stack`.

    Raises:
        StackError: a service ends or does not answer in time, or another program has its port; the error names its log or the port.
            Running services stay up for inspection.
        ConfigError: a required program is not installed, or the stack runs with another S3 server.
        StoreError: the bucket cannot be created.
    """
    with alone(project.state / ".stack.lock"):
        stack = load_stack(project, own_s3)
        if S3 not in stack.file.services:
            _make_bucket(stack)
        supervisor = _connect(stack.run) or _start_supervisor(stack)
        config = stack.folder / "supervisor.conf"
        if not config.is_file() or config.read_text() != _config(stack):
            remedy = "dml stack down, then up, which deletes the stack's data" if S3 in stack.file.services else "dml stack restart"
            report(
                f"note: the running servers have other settings than today's (version, cores or interpreter); to give them these: {remedy}"
            )
        for level in stack.levels:
            until = time.monotonic() + UP_SECONDS
            fresh = [name for name in level if _start(supervisor, stack, name)]
            for name in level:
                _wait(supervisor, stack, name, until)
            for name in level:
                _set_up(stack, name, report)
            for name in fresh:
                report(f"{name}: up at {stack.address(name)}")
                if name == S3 and any((stack.folder / RECORDS).glob("*")):
                    report(f"note: {S3}: its objects were in memory and are gone; finished steps run again")
        write_private(stack.environment_file, stack_text(stack.file.clients))
    return stack


def restart(project: Project, report: Callable[[str], None]) -> Stack:
    """End all processes of a stack with the user's own S3 server and start them with today's code and settings; databases and records stay.

    Raises:
        ConfigError: no stack of this project was started, or it has the stack's S3 server; or as `up`.
        StackError: a process does not end; or as `up`.
    """
    with alone(project.state / ".stack.lock"):
        stack = _started(project)
        if S3 in stack.file.services:
            raise ConfigError("a restart would lose the objects of the stack's S3 server, which are in memory; dml stack down, then up")
        _end(stack.folder, stack.run)
    return up(project, report)


def _started(project: Project) -> Stack:
    """Return the stack that was started and not stopped since."""
    if not (project.state / "stack" / CHOSEN).is_file():
        raise ConfigError("no stack of this project is up; start it: dml stack up")
    return load_stack(project)


def status(project: Project) -> list[Status]:
    """Return the state of each service, without starting any.

    Raises:
        ConfigError: no stack of this project was started, or it was stopped.
        StackError: its supervisor was killed, and has left services that nothing restarts.
    """
    stack = _started(project)
    supervisor = _connect(stack.run)
    if supervisor is None and (left := processes_of(stack.folder, stack.run)):
        lost = ", which loses the objects of its S3 server" if S3 in stack.file.services else ""
        raise StackError(f"supervisor was killed, and nothing restarts the {len(left)} processes it left; dml stack up ends them{lost}")
    processes = {} if supervisor is None else {entry["name"]: entry for entry in supervisor.getAllProcessInfo()}
    states = []
    for name in stack.file.services:
        process = processes.get(name, {"statename": "STOPPED", "pid": 0})
        if process["statename"] in RUNNING:
            state = "up" if _answers(stack, name, process["pid"]) else "starting"
        else:
            state = "dead" if process["statename"] in ("FATAL", "EXITED") else "down"
        states.append(Status(name, state, process["pid"] or None, stack.address(name), stack.log(name)))
    return states


def down(project: Project) -> int:
    """End all processes of the stack, remove its files except the logs, and return the number of processes killed.

    Raises:
        StackError: a process does not end.
    """
    folder, run = project.state / "stack", run_folder(project.state)
    with alone(project.state / ".stack.lock"):
        (project.state / STACK_ENV).unlink(missing_ok=True)
        num_killed = _end(folder, run)
        for name in (CHOSEN, "supervisor.conf"):
            (folder / name).unlink(missing_ok=True)
        for place in (folder / RECORDS, folder / DATA, run):
            shutil.rmtree(place, ignore_errors=True)
    return num_killed


def _end(folder: Path, run: Path) -> int:
    """End all processes of the stack, and return the number of those that had to be killed."""
    supervisor = _connect(run)
    if supervisor is not None:
        process = psutil.Process(supervisor.getPID())
        supervisor.shutdown()
        psutil.wait_procs([process], DOWN_SECONDS)
    return _kill_left(folder, run)


def processes_of(folder: Path, run: Path) -> list[psutil.Process]:
    """Return a stack's processes: they have its mark in their environment, or work in its folder (PostgreSQL and Ray overwrite theirs).

    A process with a terminal there is a person's: a shell, or a reader of the logs.
    """
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                has_mark, works_in = process.environ().get(MARK) == str(folder), Path(process.cwd()).is_relative_to
                is_there = works_in(run) or works_in(folder / DATA) or any(str(run) in word for word in process.cmdline())
                if has_mark or (is_there and process.terminal() is None):
                    processes.append(process)
    return processes


def _kill_left(folder: Path, run: Path) -> int:
    """Kill the processes that supervisor left, children of a killed worker, or all if supervisor was killed; return their number."""
    left = processes_of(folder, run)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _, alive = psutil.wait_procs(left, timeout=10)
    if alive:
        raise StackError(f"processes of the stack cannot be stopped: {', '.join(str(process.pid) for process in alive)}")
    return len(left)


def _connect(run: Path) -> Any:
    """Return the functions of the stack's supervisor (http://supervisord.org/api.html), or None if it does not run."""
    try:
        from supervisor.xmlrpc import SupervisorTransport
    except ImportError:
        raise ConfigError("the local stack needs the packages supervisor and moto[server]; make -B .venv/.done") from None
    transport = SupervisorTransport(None, None, f"unix://{run / 'supervisor.sock'}")
    supervisor = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport).supervisor
    try:
        supervisor.getState()
    except (OSError, xmlrpc.client.Error):
        return None
    return supervisor


def _start_supervisor(stack: Stack) -> Any:
    """Return the functions of a new supervisor, after killing what a killed one has left."""
    _kill_left(stack.folder, stack.run)
    for place in (stack.run, stack.data):
        place.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        stack.data.chmod(0o755)  # whatever the umask: PostgreSQL's user must reach its folder there
    for name, service in stack.file.services.items():
        (stack.folder / name).mkdir(parents=True, exist_ok=True)
        if service.user is not None:
            place = stack.data / name
            place.mkdir(mode=0o700, exist_ok=True)
            if os.geteuid() == 0:
                try:
                    shutil.chown(place, service.user, service.user)
                except LookupError as error:
                    raise ConfigError(f"{name}: {error}; create this user and group, or start the stack without root") from None
    config = stack.folder / "supervisor.conf"
    write_private(config, _config(stack))
    command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(config)]
    started = subprocess.run(command, cwd=stack.root, env=stack.environment, capture_output=True, text=True, check=False)
    supervisor = _connect(stack.run)  # it listens before it goes to the background
    if supervisor is None:
        raise StackError(f"supervisor does not start: {(started.stderr or started.stdout).strip()[-300:]}")
    return supervisor


def _config(stack: Stack) -> str:
    """Return supervisor's configuration. It contains secrets in environments, so only the user may read it."""
    is_root = os.geteuid() == 0
    sections: dict[str, dict[str, object]] = {
        "unix_http_server": {"file": stack.run / "supervisor.sock", "chmod": "0700"},
        "supervisord": {
            "logfile": stack.folder / "supervisor.log",
            "pidfile": stack.run / "supervisor.pid",
            "childlogdir": stack.folder,
            **({"user": "root"} if is_root else {}),
        },
        "rpcinterface:supervisor": {"supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"},
    }
    for priority, level in enumerate(stack.levels):
        for name in level:
            service = stack.file.services[name]
            sections[f"program:{name}"] = {
                "command": service.command,
                "directory": stack.root if service.user is None else stack.data / name,
                "environment": ",".join(f'{variable}="{value}"' for variable, value in service.environment.items()),
                "priority": priority,  # the order of the end, backwards
                "autostart": "false",
                "autorestart": str(service.restart).lower(),
                "startsecs": 20,  # who ends earlier did not start, and is tried again `startretries` times
                "startretries": 3 if service.restart else 0,
                "stopwaitsecs": 8,
                "stopasgroup": "true",
                "killasgroup": "true",
                "redirect_stderr": "true",
                "stdout_logfile": stack.log(name),
                "stdout_logfile_maxbytes": "20MB",
                "stdout_logfile_backups": 1,
                **({"user": service.user} if service.user is not None and is_root else {}),
            }
    lines = [line for name, values in sections.items() for line in (f"[{name}]", *(f"{key}={value}" for key, value in values.items()))]
    return "\n".join(lines).replace("%", "%%") + "\n"


def _start(supervisor: Any, stack: Stack, name: str) -> bool:
    """Start a service unless it runs; return whether it was started."""
    from supervisor.xmlrpc import Faults

    if supervisor.getProcessInfo(name)["statename"] in RUNNING:
        return False
    _check_ports(stack, name)
    try:
        supervisor.startProcess(name, False)
    except xmlrpc.client.Fault as fault:
        if fault.faultCode not in (Faults.ALREADY_STARTED, Faults.SPAWN_ERROR):  # restarted meanwhile; ended at once, and is tried again
            raise StackError(f"{name} cannot be started ({fault.faultString}); see infra/stack.yaml") from None
    return True


def _check_ports(stack: Stack, name: str) -> None:
    """Check that no other program has a port of a service that does not run."""
    for port in (stack.ports[port] for port in stack.file.services[name].ports):
        try:
            socket.create_server((stack.file.host, port)).close()
        except OSError:
            raise StackError(f"{name}: port {port} is taken by another program; end it, then: dml stack up ({OTHER_PORTS})") from None


def _wait(supervisor: Any, stack: Stack, name: str, until: float) -> None:
    """Wait until a service answers; an error if supervisor has given it up, or the time is over."""
    while not _answers(stack, name, (process := supervisor.getProcessInfo(name))["pid"]):
        if process["statename"] == "FATAL" or (process["statename"] == "EXITED" and not stack.file.services[name].restart):
            _check_ports(stack, name)
            raise StackError(f"{name} ended ({process['spawnerr'] or process['description']}); see {stack.log(name)}")
        if time.monotonic() > until:
            raise StackError(f"{name} does not answer at {stack.address(name)}; see {stack.log(name)}")
        time.sleep(0.2)


def _set_up(stack: Stack, name: str, report: Callable[[str], None]) -> None:
    """Set up a service that answers: the bucket of the S3 server; its own commands, again after a change of `_setup_mark` or `PASSED`.

    Settings that are not given leave what earlier ones have set up, as a later `up` from another shell may lack them.
    """
    if name == S3:
        _make_bucket(stack)
    service, done = stack.file.services[name], stack.data / f"{name}.set-up"  # lost with the databases that it is about
    given = "".join(f"{variable}={stack.environment[variable]}\n" for variable in PASSED if stack.environment.get(variable))
    mark_before, _, given_before = (done.read_text() if done.exists() else "").partition(" ")
    marks = _setup_mark(stack, service), hashlib.sha256(given.encode()).hexdigest() if given else given_before
    if marks == (mark_before, given_before):
        return
    if service.setup and done.exists():
        report(f"{name}: set up again, as its settings or the code changed")
    for command in service.setup:
        try:
            with stack.log(name).open("a") as log:
                subprocess.run(
                    shlex.split(command),
                    cwd=stack.root,
                    env=stack.environment | service.environment,
                    stdout=log,
                    stderr=log,
                    timeout=SETUP_SECONDS,
                    check=True,
                )
        except subprocess.SubprocessError as error:
            what = "failed" if isinstance(error, subprocess.CalledProcessError) else f"took longer than {SETUP_SECONDS} s"
            raise StackError(f"{name}: '{command}' {what}; see {stack.log(name)}, then rerun dml stack up") from None
    done.write_text(" ".join(marks))


def _setup_mark(stack: Stack, service: Service) -> str:
    """Return a hash of what a service's setup commands read: the files that they name, the flows' code, and the names that forms list."""
    named = [stack.root / word for command in service.setup for word in shlex.split(command)[1:]]
    flows = sorted((stack.root / "flows").rglob("*.py"))
    files = {str(path): path.read_text() for path in (*named, *flows) if path.is_file()}
    names = [[str(path) for path in sorted((stack.root / "flows" / "tables").glob("*/*.yaml"))]]
    with contextlib.suppress(ConfigError, KeyError, TypeError):  # as in the forms, which list none then
        params = read_yaml(stack.root / "params.yaml")
        names += [[*part] for part in (params["datasets"], params["comparison"]["datasets"], params["comparison"]["variants"])]
    return json_sha256([service.setup, version("prefect"), files, names])


def _make_bucket(stack: Stack) -> None:
    login = {name.lower(): stack.file.clients[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    make_bucket(stack.file.bucket, login | {"endpoint_url": stack.file.clients["AWS_ENDPOINT_URL"]})


def _answers(stack: Stack, name: str, pid: int) -> bool:
    """Return whether a service, whose process is `pid` (0: none), is healthy.

    Its own port answers ("tcp"), and a command succeeds ("exec ...") or a page answers ("/...").
    """
    address, health = stack.address(name), stack.file.services[name].health
    if not _listens(pid, stack.port(name)):
        return False
    if health == "tcp":
        return environment.answers(address)
    if health.startswith("exec "):
        return subprocess.run(shlex.split(health)[1:], capture_output=True, check=False).returncode == 0
    try:
        return bool(requests.get(f"http://{address}{health}", timeout=ASK_SECONDS).ok)
    except requests.RequestException:
        return False


def _listens(pid: int, port: int) -> bool:
    """Return whether a process or one below it listens at a port; True if the system does not tell, as of another user's process."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        sockets = [entry for one in family for entry in one.net_connections("tcp") if entry.status == psutil.CONN_LISTEN]
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:  # or one below it has just ended
        return False
    return any(entry.laddr.port == port for entry in sockets)
