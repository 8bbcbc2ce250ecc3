"""The places of a project's files, and the environment of all its processes.

The project's root is the nearest folder at or above the working directory with a `params.yaml`. Runs write below `state/` there, or to the
folder in `DML_STATE`; finished runs go to `DML_STORE`, a folder or `s3://bucket/prefix`. While a local stack is up (`dml stack up`),
`stack/env` in the state folder names the servers to use; variables set by the user override it. A relative folder in a variable is one in
the working directory of the command, also for its processes that have another one, such as Ray's workers.
"""

import base64
import hashlib
import os
import re
import secrets
import shlex
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from dml_core.errors import ConfigError, StoreError
from dml_core.files import read_regular, write_errors

STACK_ENV = Path("stack") / "env"
STACK_TITLE = "# Written by `dml stack up`, read by every dml command of this project; `dml stack down` removes it."
PLACES = ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_HOME", "PREFECT_LOCAL_STORAGE_PATH", "RAY_ADDRESS", "AWS_ENDPOINT_URL")
FOLDERS = ("DML_STATE", "DML_WEIGHTS", "PREFECT_HOME", "PREFECT_LOCAL_STORAGE_PATH", "RAY_AUTH_TOKEN_PATH", "TORCH_HOME", "XDG_CACHE_HOME")
# Of Prefect's server of one flow, which needs no schedules, automations, late and paused flows, and no history of events.
UNUSED_SERVICES = ("SCHEDULER", "LATE_RUNS", "FOREMAN", "PAUSE_EXPIRATIONS", "CANCELLATION_CLEANUP", "TRIGGERS", "EVENT_PERSISTER")
SECRET_VARIABLES = re.compile(r"PASSWORD|SECRET|TOKEN$|API_KEY$|AUTH_STRING$")
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 10.0
RAY_FOLDER_BYTES = 39  # of the path of Ray's temporary folder: Ray adds 68, and paths of sockets have at most 107
SHORTEST_SECRET = 6  # letters; shorter ones would match in any text
_ADDRESS = re.compile(r"://(?:[^/@\s'\"]+@)?([^?\s'\"]*)(?:\?[^\s'\"]+(?<![),.;:]))?")
_PASSWORD_OF_ADDRESS = re.compile(r"://[^/@:\s]*:((?:(?!://)[^@\s])+)@")


@dataclass(frozen=True)
class Project:
    """The places of one project: `root` holds `params.yaml` and `dvc.yaml`, `state` the files of runs, `store` finished runs."""

    root: Path
    state: Path
    store: str
    tracking_uri: str

    @property
    def params_file(self) -> Path:
        """Path of the standing comparison's parameters."""
        return self.root / "params.yaml"

    @property
    def is_tracked(self) -> bool:
        """True if MLflow can hold runs; opening a missing database would create it."""
        path = self.tracking_uri.removeprefix("sqlite:///")
        return path == self.tracking_uri or Path(path).exists()

    def packed(self, dataset: str) -> Path:
        """Return the folder of a dataset's packed store, the output of `prepare` and of its DVC stage."""
        return self.root / "data" / "packed" / dataset

    def results(self, dataset: str) -> Path:
        """Return the folder of a dataset's comparison report, DVC's metrics and plots."""
        return self.root / "results" / dataset


def find_project(*starts: Path) -> Project:
    """Return the project around the first folder that is in one, by default the working directory, with the servers of its local stack.

    Raises:
        ConfigError: no `params.yaml` here or above, a state folder whose name cannot be part of a database address, a store that is
            neither a folder nor in a bucket, or a folder as MLflow's address.
        StoreError: the file of the local stack is damaged.
    """
    starts = starts or (Path.cwd(),)
    root = next((folder for start in starts for folder in (start, *start.parents) if (folder / "params.yaml").is_file()), None)
    if root is None:
        raise ConfigError(f"{starts[0]}: no params.yaml here or in any parent folder; cd to your checkout of dml-repro")
    state = state_folder(root)
    if "?" in str(state):
        raise ConfigError(f"{state}: a SQLite address cannot contain '?'; rename the folder, or set DML_STATE to another one")
    settings = stack_environment(state) | {name: value for name, value in os.environ.items() if value}
    store = _store(settings.get("DML_STORE", str(state / "store")))
    return Project(root, state, store, _tracking(settings.get("MLFLOW_TRACKING_URI", f"sqlite:///{state / 'mlflow.db'}")))


def state_folder(root: Path) -> Path:
    """Return the state folder of the project at `root`: `DML_STATE`, or `state` in it."""
    return _folder(os.environ.get("DML_STATE") or str(root / "state"))


def _folder(path: str) -> Path:
    """Return a folder's absolute path, with `~` replaced."""
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111 - Path's own raises for an unknown user


def _store(address: str) -> str:
    """Return a store's address, an absolute folder or `s3://bucket/prefix`."""
    if address.startswith("s3://"):
        return address
    if re.match(r"[\w+.-]+:/", address):  # a misspelt scheme would become a folder's name
        raise ConfigError(f"DML_STORE: '{without_secrets(address)}' is neither a folder nor s3://bucket/prefix; set it to one of them")
    return str(_folder(address))


def _tracking(address: str) -> str:
    """Return MLflow's address; a SQLite file has an absolute path.

    Raises:
        ConfigError: it is neither a server's nor a SQLite file's, or that has options, which the project's own readers do not know.
    """
    path = address.removeprefix("sqlite:///")
    is_file = path not in (address, "", ":memory:")
    if not is_file and (re.match(r"\s*(file|sqlite)\b", address, re.IGNORECASE) or ("://" not in address and address != "databricks")):
        remedy = "MLflow keeps no runs in folders any more; unset it, or set it to one of these"
        raise ConfigError(f"MLFLOW_TRACKING_URI: '{shown(address)}' is neither http://SERVER nor sqlite:///FILE, and {remedy}")
    uri = f"sqlite:///{_folder(path)}" if is_file else address
    if is_file and "?" in uri:
        raise ConfigError(f"MLFLOW_TRACKING_URI: '{uri}': options and '?' are not supported in a SQLite address; remove them")
    return uri


def ray_cluster() -> str | None:
    """Return the address of the Ray cluster, or None if Ray starts on this machine: `RAY_ADDRESS` is unset or `local`."""
    address = os.environ.get("RAY_ADDRESS", "")
    return None if address in ("", "local") else address


def ray_address() -> str:
    """Return the address that Ray connects to: the cluster's or `local`.

    Raises:
        ConfigError: it is Ray Client's, which lacks what placement and training need.
    """
    address = ray_cluster() or "local"
    if address.startswith("ray://"):
        raise ConfigError(f"RAY_ADDRESS: '{shown(address)}' is for Ray Client; on a node of the cluster, set it to HEAD:6379")
    return address


def num_cores() -> int:
    """Return the number of cores that this process may use: a container or a job of a scheduler may have fewer than the machine."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has none
    quotas = _limits("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])
    limits = [max(1, quota // period) for quota, period in quotas if quota > 0]  # -1 in version 1 without a limit
    granted = os.environ.get("SLURM_CPUS_ON_NODE", "")  # Slurm's default binds no job to its cores
    return min([allowed, *limits, *([int(granted)] if granted.isdecimal() else [])])


def memory_bytes() -> int:
    """Return the memory of this machine, or the smaller limit of the container, the job or the service that this process is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for (limit,) in _limits("memory", ["memory.max"], ["memory.limit_in_bytes"]))])


def _limits(controller: str, names: list[str], former_names: list[str]) -> list[list[int]]:
    """Return the numbers in these files of this process's cgroup and of those around it, of version 2 (`names`) and of version 1."""
    groups = {"": "/", controller: "/"}
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)  # version 2 names no controllers
            groups |= dict.fromkeys(controllers.split(","), group)
    limits = []
    for folder, group, files in (("", groups[""], names), (controller, groups[controller], former_names)):
        own = Path("/sys/fs/cgroup", folder, group.strip("/"))
        for place in (own, *own.parents):
            with suppress(OSError, ValueError):  # "max" without a limit
                limits.append([int(number) for name in files for number in (place / name).read_text(encoding="utf-8").split()])
    return [numbers for numbers in limits if numbers]


def prefect_server() -> str | None:
    """Return the address of Prefect's server, or None if each flow starts one for itself: `PREFECT_API_URL` is unset."""
    return os.environ.get("PREFECT_API_URL") or None


def _plain(address: str | None) -> str | None:
    """Return an address in the spelling of the local stack."""
    return address and re.sub(r"^http://(localhost|\[::1\])(?=[:/]|$)", "http://127.0.0.1", address.lower()).rstrip("/")


def login(password: str | None, token: str | None) -> dict[str, str]:
    """Return the header that identifies a user, by `user:password` or by a token; empty without either."""
    if password:
        return {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def stack_text(values: dict[str, str]) -> str:
    """Return the text of the local stack's settings file, which a shell can read, with the SHA-256 of its lines."""
    lines = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    return f"{STACK_TITLE}\n# sha256 {hashlib.sha256(lines.encode()).hexdigest()}\n{lines}"


def stack_environment(state: Path) -> dict[str, str]:
    """Return the variables the local stack has written for its users; empty if no stack is up. Its login is not for another Prefect server.

    Raises:
        StoreError: the file is damaged or another user's; continuing without it would write to servers other than the stack's.
    """
    path = state / STACK_ENV
    if not path.is_symlink() and not path.exists():
        return {}
    try:
        text = read_regular(path).decode()
        values = dict(word.split("=", 1) for word in shlex.split(text, comments=True))
    except PermissionError:
        raise StoreError(f"{path}: cannot be read; it is of the user who started the stack, so use a project of your own") from None
    except (OSError, ValueError):
        text, values = "", {}
    if text != stack_text(values):
        raise StoreError(f"{path}: damaged, or written by another version; remove it, then: dml stack up")
    is_other = _plain(prefect_server()) not in (None, _plain(values.get("PREFECT_API_URL")))
    return {name: value for name, value in values.items() if not (is_other and name == "PREFECT_API_AUTH_STRING")}


def overridden(stack: dict[str, str]) -> list[str]:
    """Return the names of the local stack's variables that the user has set to other values."""
    return sorted(name for name, value in stack.items() if os.environ.get(name) != value)


def open_project() -> Project:
    """Return the project around the working directory, with the environment set for later imports.

    Raises:
        ConfigError: there is no project here.
        StoreError: its state folder cannot be written.
    """
    project = find_project()
    set_environment(project)
    return project


def shown(address: str) -> str:
    """Return an address without user, password, query and fragment, so that it may be printed or stored; a path is kept whole."""
    if address.startswith("/"):
        return address
    if ":///" in address:
        return address.partition("?")[0]
    scheme, mark, rest = address.partition("://") if "://" in address else ("", "", address)
    server = re.split("[/?#]", rest)[0]
    if "@" not in server and ("sql" in scheme or re.match(r"[^\[\]:]*:.*\D", server)):  # no port: a password with such a letter
        server = rest
    return f"{scheme}{mark}{re.split('[?#]', rest[server.rfind('@') + 1 :])[0]}"


def answers(address: str, is_asked: bool = False) -> bool:
    """Return whether a process listens at an address; True for values that are not another process's address (a file, "auto", empty).

    Of a server that is reached through a proxy (`http_proxy`), the proxy has to listen. A server that `is_asked` has to answer, too, which
    one behind a tunnel or a halted process does not: its client would wait for minutes.
    """
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.scheme not in ("", "http", "https") or not parts.hostname or (not parts.scheme and not parts.port):
            return True
        port = parts.port or (443 if parts.scheme == "https" else 80)
        proxy = _proxy(parts.scheme, parts.hostname)
        place = (parts.hostname, port) if proxy is None else (str(proxy.hostname), proxy.port or 80)
        with socket.create_connection(place, timeout=CONNECT_SECONDS) as connection:
            if is_asked and proxy is None and parts.scheme == "http":
                connection.settimeout(ANSWER_SECONDS)
                connection.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
                return connection.recv(1) != b""
            return True
    except (OSError, ValueError):  # ValueError: no port, or no address at all
        return False


def _proxy(scheme: str, host: str) -> SplitResult | None:
    """Return the proxy through which the libraries reach a server, or None if they do so directly."""
    if scheme not in ("http", "https"):
        return None
    from urllib.request import getproxies, proxy_bypass  # takes a tenth of a second

    proxies = getproxies()
    proxy = None if proxy_bypass(host, proxies) else proxies.get(scheme, proxies.get("all"))
    return urlsplit(proxy if "://" in proxy else f"//{proxy}") if proxy else None


def without_secrets(text: str) -> str:
    """Remove the secrets of this environment and the users and queries of addresses from a text (an error, a traceback).

    Secrets are the values of variables named as such, and passwords in addresses that variables hold. Queries sign presigned addresses.
    """
    text = _ADDRESS.sub(r"://\1", text)
    hidden = {part for name, value in os.environ.items() if SECRET_VARIABLES.search(name) for part in (value, value.partition(":")[2])}
    passwords = {password for value in os.environ.values() for password in _PASSWORD_OF_ADDRESS.findall(value)}
    for password in passwords:
        text = text.replace(f":{password}@", ":***@")  # a short one, too
    for secret in sorted((secret for secret in hidden | passwords if len(secret) >= SHORTEST_SECRET), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def finished_records() -> Path:
    """Return the folder where Prefect keeps one record per finished step, named by identity; call `set_environment` first."""
    home = os.environ.get("PREFECT_HOME") or "~/.prefect"
    return Path(os.environ.get("PREFECT_LOCAL_STORAGE_PATH") or _folder(home) / "storage")


def reach_own_servers() -> None:
    """Let this process and its children reach servers of this machine without the proxy that `http_proxy` may name."""
    if (direct := os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")) != "*":
        os.environ["no_proxy"] = ",".join(dict.fromkeys([*filter(None, direct.split(",")), "127.0.0.1", "localhost", "::1"]))


def set_environment(project: Project) -> None:
    """Set the variables that Prefect, Ray, MLflow and DVC read at import, for this process and its children. The user's values stay.

    Empty variables of the project and of places and addresses (`PLACES`) are removed: empty means unset. Folders become absolute. The local
    stack's variables are set if it is up. Must run before any of these libraries is imported. `REASONS` in
    infra/docs/environment_variables.py gives the reason for each.

    Raises:
        StoreError: the state folder or `PREFECT_HOME` cannot be written, or the file of the local stack is damaged.
    """
    for name in [name for name, value in os.environ.items() if not value and (name.startswith("DML_") or name in PLACES)]:
        del os.environ[name]
    for name in filter(os.environ.get, FOLDERS):
        os.environ[name] = str(_folder(os.environ[name]))
    if "DML_STORE" in os.environ:
        os.environ["DML_STORE"] = project.store
    os.environ["MLFLOW_TRACKING_URI"] = project.tracking_uri
    for name, value in stack_environment(project.state).items():
        os.environ.setdefault(name, value)
    reach_own_servers()
    defaults = {
        "PREFECT_HOME": str(project.state / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "INFO" if prefect_server() else "CRITICAL",
        "PREFECT_INTERNAL_LOGGING_LEVEL": "ERROR" if prefect_server() else "CRITICAL",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,dml_core",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "DO_NOT_TRACK": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
        "RAY_worker_niceness": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "120",
        "DVC_NO_ANALYTICS": "true",
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
    }
    if prefect_server() is None:
        defaults |= {f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in UNUSED_SERVICES}
    if ray_cluster() is None:
        defaults |= _ray_on_this_machine()
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - Path.home() raises for a container's user who is in no password file
        defaults["HOME"] = str(project.state / "home")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    home = Path(os.environ["PREFECT_HOME"])
    with write_errors(f"{home}:", "set DML_STATE or PREFECT_HOME to a writable folder"):
        home.mkdir(parents=True, exist_ok=True)  # Prefect's server does not create parents, and times out


def ray_folder() -> Path | None:
    """Create and return a folder for the sockets, logs and spilled objects of a Ray on this machine, which uses it from now on.

    None with a cluster, and if the folder cannot be created or its path would be too long: Ray then uses one that stays.
    """
    within = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if ray_cluster() is None and len(os.fsencode(within)) + len("/dml-ray-12345678") <= RAY_FOLDER_BYTES:
        with suppress(OSError):
            os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="dml-ray-", dir=within)
            return Path(os.environ["RAY_TMPDIR"])
    return None


def _ray_on_this_machine() -> dict[str, str]:
    """Return settings of a Ray started for one flow: other machines cannot reach it, and its callers need a token.

    Each flow gets a new token, which is only in the environment of its processes. The address is set by a switch of Ray: with it Ray uses
    127.0.0.1 as the node's address where clusters are not supported, despite the switch's name.
    """
    token = {} if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    folder = {"RAY_TMPDIR": "/tmp"} if len(os.fsencode(os.environ.get("TMPDIR", ""))) > RAY_FOLDER_BYTES else {}
    return {
        **token,
        **folder,
        "RAY_LD_PRELOAD_ON_WORKERS": "1",
        "MALLOC_CONF": "dirty_decay_ms:-1",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_agent_register_timeout_ms": "120000",
        "RAY_raylet_client_connect_timeout_milliseconds": "20",
        "RAY_raylet_client_num_connect_attempts": "500",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }
