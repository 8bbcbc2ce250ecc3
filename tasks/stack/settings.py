"""Read `infra/stack.yaml` for this machine, with the placeholders of its commands and environments filled in.

The first `up` chooses ports, secrets, the S3 server and the folder of sockets; until `down` they stay in `state/stack/chosen.json`, which
only the user can read.
"""

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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dml_core.config import Config, parse, read_yaml
from dml_core.errors import ConfigError
from dml_core.files import writing
from tasks.environment import RAY_FOLDER_BYTES, STACK_ENV, Project, num_cores, reach_own_servers, shown

MARK = "DML_STACK"  # variable with the stack's folder, in the environment of all its processes
CHOSEN = "chosen.json"
S3 = "s3"
RECORDS = "records"
DATA = "data"
OWN_SETTINGS = ("MLFLOW_", "PREFECT_", "RAY_", "DML_", "DVC_", "AWS_")
PASSED = ("DML_WEBHOOK",)  # own settings that its processes receive all the same
ALL_PORTS = range(20_000, 65_536)  # to choose from: Ray gives the ones below to its workers


class Service(Config):
    """One server of the stack; `infra/stack.yaml` documents the fields."""

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
    clients: dict[str, str]
    services: dict[str, Service]
    common: dict[str, str]


@dataclass(frozen=True)
class Stack:
    """A project's stack.

    Attributes:
        folder: its folder in the state folder.
        run: a folder with a short path, for sockets and for what another user must reach.
        root: the project's folder.
        file: `infra/stack.yaml` with its placeholders filled in, and without the S3 server if the user's own is used.
        ports: as chosen by the first `up`.
        environment: variables of all its processes.
    """

    folder: Path
    run: Path
    root: Path
    file: StackFile
    ports: dict[str, int]
    environment: dict[str, str]

    @property
    def environment_file(self) -> Path:
        """Path of the file `dml` reads while the stack is up."""
        return self.folder.parent / STACK_ENV

    @property
    def levels(self) -> list[list[str]]:
        """Names of the services in starting order: each level needs only services of earlier levels."""
        levels: list[list[str]] = []
        done: set[str] = set()
        while len(done) < len(self.file.services):
            level = [name for name, service in self.file.services.items() if name not in done and done.issuperset(service.after)]
            if not level:
                raise ConfigError("infra/stack.yaml: services depend on each other in a cycle, or on an unknown service")
            levels.append(level)
            done.update(level)
        return levels

    @property
    def data(self) -> Path:
        """Folder of the databases: in the state folder, or if root starts the stack in `run`, as their user may not reach the other."""
        return self.run if os.geteuid() == 0 else self.folder / DATA

    def log(self, name: str) -> Path:
        """Return the path of a service's log."""
        return self.folder / name / "log"

    def address(self, name: str) -> str:
        """Return the address at which a service is asked for its health."""
        return f"{self.file.host}:{self.port(name)}"

    def port(self, name: str) -> int:
        """Return the port at which a service is asked for its health."""
        return self.ports[self.file.services[name].ports[0]]


def load_stack(project: Project, own_s3: str | None = None) -> Stack:
    """Return the project's stack; choose ports, secrets and the S3 server on first use.

    `own_s3` is the address of the user's own S3 server, which replaces the stack's; None means that of the first `up`.

    Raises:
        ConfigError: the file is wrong, PostgreSQL is not installed, or another S3 server was chosen before.
    """
    reach_own_servers()
    path = project.root / "infra" / "stack.yaml"
    file = parse(StackFile, read_yaml(path), str(path))
    folder, run = project.state / "stack", run_folder(project.state)
    folder.mkdir(parents=True, exist_ok=True)
    ports, words, s3 = _choose(folder / CHOSEN, file, own_s3, run)
    values = file.model_dump()
    if not s3["is_stacks"]:
        del values["services"][S3]
        for service in values["services"].values():
            service["after"] = [name for name in service["after"] if name != S3]
    known = {
        "host": file.host,
        "bucket": file.bucket,
        "ports": ports,
        "secrets": words,
        "s3": s3,
        "stack": folder,
        "run": shlex.quote(str(run)),  # with the next only in commands, which are split like a shell's
        "python": shlex.quote(sys.executable),
        "postgresql": _postgresql(file.versions["postgresql"]),
        "records": folder / (RECORDS if s3["is_stacks"] else f"{RECORDS}-{_short_digest(s3['address'])}"),
        "share": max(1, num_cores() // 2),
    }
    file = parse(StackFile, _filled(values, known), str(path))
    passed = {name: value for name, value in os.environ.items() if name in PASSED or not name.startswith(OWN_SETTINGS)}
    shared = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{passed.get('PATH', '')}",
        "PYTHONPATH": str(project.root),
        "PYTHONUNBUFFERED": "1",
        "DML_ROOT": str(project.root),
        "DML_STATE": str(project.state),
        "TMPDIR": str(run),  # Prefect's worker needs a folder in it that another user's worker may have made, and does not start then
        MARK: str(folder),
    }
    return Stack(folder, run, project.root, file, ports, passed | file.clients | file.common | shared)


def run_folder(state: Path) -> Path:
    """Return a folder with a short path for sockets, and for what PostgreSQL's user must reach: that of the first `up`, whatever TMPDIR is.

    Raises:
        ConfigError: another user has made it, whose supervisor the stack would be controlled by; or as `_chosen_before`.
    """
    chosen, name = state / "stack" / CHOSEN, f"dml-stack-{_short_digest(str(state))}"
    folder = Path(_chosen_before(chosen).get("run") or f"{tempfile.gettempdir()}/{name}")
    if len(os.fsencode(folder)) > RAY_FOLDER_BYTES:
        folder = Path("/tmp", name)
    with suppress(FileNotFoundError):
        if folder.lstat().st_uid != os.geteuid():
            raise ConfigError(f"{folder}: another user's; remove it, or set TMPDIR to a folder of your own")
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file that only the user can read."""
    with writing(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text.encode())


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _filled(value: Any, known: dict[str, Any]) -> Any:
    """Return plain YAML values with the placeholders in all texts filled in."""
    if isinstance(value, str):
        return value.format(**known)
    if isinstance(value, dict):
        return {key: _filled(part, known) for key, part in value.items()}
    return [_filled(part, known) for part in value] if isinstance(value, list | tuple) else value


def _chosen_before(path: Path) -> dict[str, Any]:
    """Return what the first `up` chose; empty before it."""
    try:
        if not path.is_file():
            return {}
        chosen = dict(json.loads(path.read_bytes()))
        if not chosen.keys() >= {"ports", "secrets", "s3", "run"}:
            raise ValueError
    except PermissionError:
        raise ConfigError(f"{path}: cannot be read; only the user who started the stack can use it") from None
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"{path}: damaged; remove it, then: dml stack down") from None
    here, machine = socket.gethostname(), chosen.get("machine")  # which earlier versions did not record
    if machine not in (None, here):
        renamed = f'if {here} is its new name, write that as "machine" into {path}'
        raise ConfigError(f"the stack of this project belongs to the machine {machine}; run dml stack there, or {renamed}")
    return chosen


def _choose(path: Path, file: StackFile, own_s3: str | None, run: Path) -> tuple[dict[str, int], dict[str, str], dict[str, Any]]:
    """Return ports, secrets and the S3 server from their file, which is created if missing."""
    if own_s3 is not None and not re.fullmatch(r"https?://[^/@\s]+/?", own_s3):
        raise ConfigError(f"--s3 {shown(own_s3)}: expected an address as http://host:9000; its login is in AWS_ACCESS_KEY_ID")
    own_s3 = own_s3 and own_s3.rstrip("/")  # which would have other records
    names = [name for service in file.services.values() for name in service.ports]
    if chosen := _chosen_before(path):
        if own_s3 not in (None, chosen["s3"]["address"].rstrip("/")):
            raise ConfigError(f"the stack was started with S3 at {chosen['s3']['address']}; dml stack down first")
        if not chosen["ports"].keys() >= {*names}:
            raise ConfigError(f"{path}: of a stack of another version, with other servers; take that down: dml stack down")
        of_before = {"prefect": chosen["secrets"]["ray"]}  # earlier versions chose none for Prefect
        return chosen["ports"], of_before | chosen["secrets"], chosen["s3"]
    ports = dict(zip(names, free_ports(file.host), strict=False))
    words = {name: secrets.token_hex(16) for name in ("postgres", S3, "ray", "prefect")}
    user = f"dml{secrets.token_hex(16)}"  # the stack's S3 server checks the user only
    s3 = {"address": f"http://{file.host}:{ports[S3]}", "user": user, "secret": words[S3], "is_stacks": True}
    if own_s3 is not None:  # its login is never passed as an argument
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            if variable not in os.environ:
                raise ConfigError(f"{variable} is not set; an external S3 server needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        user, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        s3 = {"address": own_s3, "user": user, "secret": secret, "is_stacks": False}
    write_private(path, json.dumps({"ports": ports, "secrets": words, "s3": s3, "run": str(run), "machine": socket.gethostname()}))
    return ports, words, s3


def free_ports(host: str) -> Iterator[int]:
    """Yield free ports in a random order, each once, that the system gives to no program unasked, if there are any.

    Others could be given to Ray's workers before a server starts, or while it is started again.
    """
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, limits.read_text().split()) if limits.is_file() else (32768, 65535)
    ports = [port for port in ALL_PORTS if not first <= port <= last] or [*ALL_PORTS]
    for port in secrets.SystemRandom().sample(ports, len(ports)):
        with suppress(OSError):
            socket.create_server((host, port)).close()
            yield port


def _postgresql(version: str) -> Path:
    """Return the folder of PostgreSQL's programs: Debian's if it has at least this version, else that of `postgres` on the path."""
    folders = {int(path.parts[-3]): path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres") if path.parts[-3].isdigit()}
    new_enough = [number for number in folders if number >= int(version)]
    if new_enough:
        return folders[min(new_enough)]
    program = shutil.which("postgres")
    if program is None:
        raise ConfigError(f"PostgreSQL {version} or newer is not installed; on Debian or Ubuntu: apt-get install postgresql")
    return Path(program).resolve().parent
