"""Read `infra/stack.yaml` for this machine: services with their commands, ports, folders and environments filled in.

The first `up` chooses ports, secrets and the S3 server; until `down` they stay in `state/stack/chosen.json`, which only the user can read.
"""

import getpass
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dml_core.config import Config, parse, read_yaml
from dml_core.errors import ConfigError
from dml_core.files import writing
from tasks.environment import STACK_ENV, Project

MARK = "DML_STACK"  # variable with the stack's folder, in the environment of all its processes
S3 = "s3"
RECORDS = "records"
OWN_SETTINGS = ("MLFLOW_", "PREFECT_", "RAY_", "DML_", "DVC_", "AWS_")


class ServiceFile(Config):
    """One service in the file, which documents the fields."""

    command: str
    ports: tuple[str, ...]
    health: str
    after: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    user: str | None = None
    restart: bool = True
    setup: tuple[str, ...] = ()


class StackFile(Config):
    """Content of `infra/stack.yaml`."""

    host: str
    versions: dict[str, str]
    bucket: str
    databases: tuple[str, ...]
    clients: dict[str, str]
    services: dict[str, ServiceFile]
    common: dict[str, str]


@dataclass(frozen=True)
class Service:
    """One server, ready to be started.

    Attributes:
        command: command line, split into words.
        folder: its own folder; its log is `log` there.
        environment: its complete environment.
        host, port: address for health checks; `health` is "tcp" or the path of a page.
        user: user that runs it if root starts it.
    """

    name: str
    command: list[str]
    folder: Path
    environment: dict[str, str]
    host: str
    port: int
    health: str
    after: tuple[str, ...]
    user: str | None
    restart: bool
    setup: tuple[list[str], ...]

    @property
    def log(self) -> Path:
        """Path of its log, which is emptied whenever the service is started."""
        return self.folder / "log"


@dataclass(frozen=True)
class Stack:
    """A project's stack: `folder` in the state folder, `run` a folder with a short path, `clients` the variables for its users."""

    folder: Path
    run: Path
    root: Path
    host: str
    bucket: str
    databases: tuple[str, ...]
    clients: dict[str, str]
    services: dict[str, Service]
    ports: dict[str, int]
    secrets: dict[str, str]
    postgresql: Path

    @property
    def environment_file(self) -> Path:
        """Path of the file `dml` reads while the stack is up."""
        return self.folder.parent / STACK_ENV

    @property
    def socket(self) -> Path:
        """Path of its supervisor's socket."""
        return self.run / "supervisor.sock"

    @property
    def levels(self) -> list[list[Service]]:
        """The services in starting order: each level needs only services of earlier levels."""
        levels: list[list[Service]] = []
        done: set[str] = set()
        while len(done) < len(self.services):
            level = [service for name, service in self.services.items() if name not in done and done.issuperset(service.after)]
            if not level:
                raise ConfigError("infra/stack.yaml: services depend on each other in a cycle, or on an unknown service")
            levels.append(level)
            done.update(service.name for service in level)
        return levels


def load_stack(project: Project, own_s3: str | None = None) -> Stack:
    """Return the project's stack; choose ports, secrets and the S3 server on first use.

    Args:
        project: project of the stack.
        own_s3: address of the user's own S3 server, replacing the stack's; None keeps an earlier choice.

    Raises:
        ConfigError: the file is wrong, PostgreSQL or supervisor is not installed, or another S3 server was chosen before.
    """
    path = project.root / "infra" / "stack.yaml"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; it describes the project's stack")
    file = parse(StackFile, read_yaml(path), str(path))
    folder, run = project.state / "stack", run_folder(project.state)
    folder.mkdir(parents=True, exist_ok=True)
    ports, words, s3 = _chosen(folder / "chosen.json", file, own_s3)
    postgresql = _postgresql(file.versions["postgresql"])
    known = {
        "host": file.host,
        "bucket": file.bucket,
        "ports": ports,
        "secrets": words,
        "s3": s3,
        "run": run,
        "root": project.root,
        "python": sys.executable,
        "postgresql": postgresql,
        "records": folder / (RECORDS if s3["is_stacks"] else f"{RECORDS}-{_short_digest(s3['address'])}"),
        "token": folder / "ray-token",
        "share": max(1, (os.cpu_count() or 1) // 2),
    }
    clients = {name: value.format(**known) for name, value in file.clients.items()}
    passed = {name: value for name, value in os.environ.items() if not name.startswith(OWN_SETTINGS)}
    shared = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{passed.get('PATH', '')}",
        "PYTHONPATH": str(project.root),
        "PYTHONUNBUFFERED": "1",
        "DML_ROOT": str(project.root),
        "DML_STATE": str(project.state),
        MARK: str(folder),
    }

    def filled(name: str, service: ServiceFile) -> Service:
        own = known | {"folder": folder / name}
        return Service(
            name=name,
            command=shlex.split(service.command.format(**own)),
            folder=folder / name,
            environment=passed | clients | file.common | shared | {key: value.format(**own) for key, value in service.environment.items()},
            host=file.host,
            port=ports[service.ports[0]],
            health=service.health,
            after=tuple(other for other in service.after if other in started),
            user=service.user if os.geteuid() == 0 else None,
            restart=service.restart,
            setup=tuple(shlex.split(line.format(**own)) for line in service.setup),
        )

    started = [name for name in file.services if name != S3 or s3["is_stacks"]]
    services = {name: filled(name, file.services[name]) for name in started}
    return Stack(folder, run, project.root, file.host, file.bucket, file.databases, clients, services, ports, words, postgresql)


def run_folder(state: Path) -> Path:
    """Return a folder with a short path that depends on the state: sockets allow 107 letters, and PostgreSQL's user must reach it."""
    return Path(tempfile.gettempdir()) / f"dml-stack-{getpass.getuser()}-{_short_digest(str(state))}"


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _chosen(path: Path, file: StackFile, own_s3: str | None) -> tuple[dict[str, int], dict[str, str], dict[str, Any]]:
    """Return ports, secrets and the S3 server from their file, which is created if missing."""
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text())
        if own_s3 not in (None, found["s3"]["address"]):
            raise ConfigError(f"the stack was started with S3 at {found['s3']['address']}; dml stack down first")
        return found["ports"], found["secrets"], found["s3"]
    names = [name for service in file.services.values() for name in service.ports]
    probes = [socket.socket() for _ in names]  # all open together, so that all get different ports
    for probe in probes:
        probe.bind((file.host, 0))
    ports = {name: int(probe.getsockname()[1]) for name, probe in zip(names, probes, strict=True)}
    for probe in probes:
        probe.close()
    words = {name: secrets.token_hex(16) for name in ("postgres", S3, "ray")}
    s3 = {"address": f"http://{file.host}:{ports[S3]}", "user": "dml", "secret": words[S3], "is_stacks": True}
    if own_s3 is not None:
        s3 = {"address": own_s3, "user": _named("AWS_ACCESS_KEY_ID"), "secret": _named("AWS_SECRET_ACCESS_KEY"), "is_stacks": False}
    write_private(path, json.dumps({"ports": ports, "secrets": words, "s3": s3}))
    return ports, words, s3


def _named(variable: str) -> str:
    """Return a credential of the user's own S3 server, which is never passed as an argument.

    Raises:
        ConfigError: it is not set.
    """
    if variable not in os.environ:
        raise ConfigError(f"{variable} is not set; an external S3 server needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    return os.environ[variable]


def write_private(path: Path, text: str) -> None:
    """Write a file that only the user can read."""
    with writing(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text.encode())


def _postgresql(version: str) -> Path:
    """Return the folder of PostgreSQL's programs: Debian's if it has at least this version, else that of `postgres` on the path.

    Raises:
        ConfigError: PostgreSQL is not installed.
    """
    found = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "postgres").exists()]
    new_enough = [path for path in found if re.fullmatch(r"\d+", path.parent.name) and int(path.parent.name) >= int(version)]
    if new_enough:
        return min(new_enough, key=lambda path: int(path.parent.name))
    named = shutil.which("postgres")
    if named is None:
        raise ConfigError(f"PostgreSQL {version} or newer is not installed; on Debian or Ubuntu: apt-get install postgresql")
    return Path(named).resolve().parent
