"""Several simulated hosts on one: each has a network namespace with an address and a mount namespace with its own project, state and /tmp.

They are connected by a bridge in a separate namespace and share only that network, the system's files and the installed packages. Needs
root and iproute2. `close` ends and removes all of them.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.e2e.conftest import Project
from tests.faults.cells import PLACED

PROJECT = Path("/srv")  # each host mounts its own project over the machine's folder
NETWORK = "10.77.0"
HEAD, STORE = f"{NETWORK}.1", f"{NETWORK}.9"
S3_PORT, RAY_PORT = 5555, 6379
# Settings to survive a network outage of half a minute: with the defaults Ray gives the node up, and boto3 the store
# (docs/how-to/cluster.md).
PATIENCE = {"RAY_health_check_failure_threshold": "20", "AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "15"}


def _namespace(*kinds: str, setup: str = "true") -> subprocess.Popen[str]:
    """Start a process that keeps new namespaces."""
    command = ["unshare", *kinds, "sh", "-c", f"{setup} && echo ready && exec sleep infinity"]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "ready\n", "namespaces cannot be made here: root is needed"
    return keeper


def _end(keeper: subprocess.Popen[str]) -> None:
    keeper.kill()
    keeper.wait()
    assert keeper.stdout is not None
    keeper.stdout.close()


class Host:
    """A host with an address on the bridge.

    Args:
        name: at most eight letters.
        number: last number of the address.
        folder: folder of the host's own `project` and `tmp`.
        switch: process that keeps the network namespace of the bridge.
    """

    def __init__(self, name: str, number: int, folder: Path, switch: subprocess.Popen[str]) -> None:
        self.name, self.address, self._switch = name, f"{NETWORK}.{number}", switch
        self.project = folder / "project"
        for place in (self.project, folder / "tmp"):
            place.mkdir(parents=True, exist_ok=True)
        mounts = f"mount --bind '{self.project}' {PROJECT} && mount --bind '{folder / 'tmp'}' /tmp"
        self.keeper = _namespace("--net", "--mount", setup=mounts)
        self.log = folder / "log.txt"
        self._started: list[subprocess.Popen[bytes]] = []
        link = f"to-{name}"
        _ip(switch, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(self.keeper.pid))
        _ip(switch, "link", "set", link, "master", "bridge", "up")
        _ip(self.keeper, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip(self.keeper, "link", "set", "lo", "up")
        _ip(self.keeper, "link", "set", "eth0", "up")

    def start(self, *command: str, environment: dict[str, str], log: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a command on the host, in its project."""
        inside = ["nsenter", f"--target={self.keeper.pid}", "--net", "--mount", f"--wd={PROJECT}"]
        with (log or self.log).open("ab") as printed:
            words = [*inside, *command]
            started = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)
        self._started.append(started)
        return started

    def processes(self) -> list[psutil.Process]:
        """Return every process on the host, except the one that keeps its namespaces."""
        here, found = Path(f"/proc/{self.keeper.pid}/ns/net").readlink(), []
        for process in psutil.process_iter():
            with suppress(OSError):
                if Path(f"/proc/{process.pid}/ns/net").readlink() == here and process.pid != self.keeper.pid:
                    found.append(process)
        return found

    def kill(self) -> None:
        """Send SIGKILL to every process on the host at once: the raylet, its agents and workers."""
        for _ in range(3):  # includes processes started meanwhile
            for process in self.processes():
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.1)

    def unplug(self) -> None:
        """Disconnect the host: packets are lost without an error."""
        _ip(self._switch, "link", "set", f"to-{self.name}", "down")

    def plug(self) -> None:
        _ip(self._switch, "link", "set", f"to-{self.name}", "up")

    def close(self) -> None:
        self.kill()
        for process in self._started:
            process.wait()
        _end(self.keeper)


def _ip(of: subprocess.Popen[str], *words: str) -> None:
    subprocess.run(["nsenter", f"--target={of.pid}", "--net", "ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """A head without CPUs, on which the flow runs; nodes of one CPU each; an S3 server on a separate host.

    Args:
        folder: an empty folder.
        project: project that each host gets a copy of.
        patience: settings of every host to survive a network outage.
    """

    def __init__(self, folder: Path, project: Project, patience: dict[str, str]) -> None:
        assert not Path(sys.prefix).is_relative_to("/tmp"), (
            "each host hides the machine's /tmp: run these tests from a clone in another folder"
        )
        self._folder, self._project = folder, project
        self._switch = _namespace("--net")
        _ip(self._switch, "link", "add", "bridge", "type", "bridge")
        _ip(self._switch, "link", "set", "bridge", "up")
        self._hosts: list[Host] = []
        self.environment = {
            **project.environment,
            "PYTHONPATH": f"{PROJECT / 'placed'}{os.pathsep}{PROJECT}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{STORE}:{S3_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": "eth0",
            **patience,
            "DML_FAULT_AT": "after-checkpoint",
            "DML_FAULT_FOLDER": str(PROJECT / "fault"),
        }
        store = self.add("store", 9)
        moto = [sys.executable, "-m", "moto.server", "-H", STORE, "-p", str(S3_PORT)]
        store.start(*moto, environment=self.environment)
        self.head = self.add("head", 1)
        self.wait(self.head, STORE, S3_PORT)
        make = "import boto3; boto3.client('s3').create_bucket(Bucket='hosts')"
        assert self.head.start(sys.executable, "-c", make, environment=self.environment).wait(60) == 0, self.head.log.read_text()
        self._ray(self.head, "--head", f"--port={RAY_PORT}", "--num-cpus=0", "--include-dashboard=false")
        self.wait(self.head, HEAD, RAY_PORT)
        self.nodes = [self.add_node("first", 2), self.add_node("second", 3)]

    def add(self, name: str, number: int) -> Host:
        """Add a host with a copy of the project."""
        host = Host(name, number, self._folder / name, self._switch)
        self._hosts.append(host)
        if name != "store":
            shutil.copytree(self._project.root, host.project, dirs_exist_ok=True, ignore=shutil.ignore_patterns("state"))
            shutil.copytree(PLACED, host.project / "placed")
            (host.project / "fault").mkdir()
            self.disarm(host)
        return host

    def add_node(self, name: str, number: int) -> Host:
        host = self.add(name, number)
        self.start_node(host)
        return host

    def start_node(self, host: Host) -> None:
        """Start Ray on a host, or restart it as a service supervisor does."""
        host.kill()
        self._ray(host, f"--address={HEAD}:{RAY_PORT}", "--num-cpus=1")

    def _ray(self, host: Host, *words: str) -> None:
        start = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            f"--node-ip-address={host.address}",
            "--block",
            "--disable-usage-stats",
        ]
        host.start(*start, *words, environment=self.environment)

    def wait(self, host: Host, address: str, port: int) -> None:
        """Wait until a host can reach a port of another."""
        knock = f"import socket; socket.create_connection(('{address}', {port}), timeout=2)"
        until = time.monotonic() + 90
        while host.start(sys.executable, "-c", knock, environment=self.environment, log=Path(os.devnull)).wait() != 0:
            assert time.monotonic() < until, f"{address}:{port} is not reached from {host.name}: {host.log.read_text()[-2000:]}"
            time.sleep(0.5)

    # ------------------------------------------------------------ runs

    def arm(self, nth: int = 2) -> None:
        """Make a worker of the next run halt after its n-th checkpoint."""
        for host in self._hosts:
            if (host.project / "fault").exists():
                (host.project / "fault" / "nth").write_text(str(nth))
            for name in ("hit", "go"):
                (host.project / "fault" / name).unlink(missing_ok=True)

    def disarm(self, host: Host) -> None:
        for name in ("hit", "go"):
            (host.project / "fault" / name).touch()

    def run(self, name: str, *words: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start `dml` on the head, with a state and a store of this name; return the process and its output file."""
        printed = self._folder / f"{name}.txt"
        places = {"DML_STATE": str(PROJECT / "state" / name), "DML_STORE": f"s3://hosts/{name}", "RAY_ADDRESS": f"{HEAD}:{RAY_PORT}"}
        command = [sys.executable, "-m", "flows.cli", *(words or ("run", "synthetic", "softtriple"))]
        return self.head.start(*command, environment=self.environment | places, log=printed), printed

    def standing(self) -> Host | None:
        """Return the host whose worker has halted, or None."""
        return next((host for host in self._hosts if (host.project / "fault" / "hit").exists()), None)

    def go(self) -> None:
        for host in self._hosts:
            if (host.project / "fault").exists():
                (host.project / "fault" / "go").touch()
                (host.project / "fault" / "hit").touch()  # no other worker halts

    def left(self, name: str) -> dict[str, bytes]:
        """Return every file of a run in the store."""
        folder = self._folder / "left" / name
        fetch = (
            "import boto3, pathlib, sys\n"
            "client, prefix, folder = boto3.client('s3'), sys.argv[1], pathlib.Path(sys.argv[2])\n"
            "for entry in client.list_objects_v2(Bucket='hosts', Prefix=prefix + '/').get('Contents', []):\n"
            "    path = folder / entry['Key'].removeprefix(prefix + '/')\n"
            "    path.parent.mkdir(parents=True, exist_ok=True)\n"
            "    path.write_bytes(client.get_object(Bucket='hosts', Key=entry['Key'])['Body'].read())\n"
        )
        inside = PROJECT / "left" / name
        assert self.head.start(sys.executable, "-c", fetch, name, str(inside), environment=self.environment).wait(60) == 0
        folder = self.head.project / "left" / name
        paths = [
            path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] in ("train", "embed", "evaluate")
        ]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths) if not path.name.startswith(".")}

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        _end(self._switch)
