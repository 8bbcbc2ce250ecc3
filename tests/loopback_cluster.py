"""A Ray cluster in other processes, whose node has a loopback address as those of the local stack have."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tasks.stack.settings import free_ports
from tests.conftest import ROOT

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_USAGE_STATS_ENABLED": "0",
}
PORTS = (
    "port",
    "node-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "runtime-env-agent-port",
)


@contextmanager
def loopback_cluster(num_cpus: int, head: str | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """Start a cluster of one node, or a node that joins the one with the address `head`.

    Yields the address and the node's first process, of which all others are descendants.
    """
    ports = dict(zip(PORTS if head is None else PORTS[1:], free_ports("127.0.0.1"), strict=False))
    options: dict[str, object] = {"node-ip-address": "127.0.0.1", "num-cpus": num_cpus, "min-worker-port": 0, "max-worker-port": 0}
    words = [f"--{name}={value}" for name, value in (ports | options).items()]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, str(ROOT / "infra/ray_on_loopback.py"), "start", "--block", *words]
    environment = kept | SETTINGS | {"PYTHONPATH": str(ROOT)}
    with (
        tempfile.TemporaryDirectory(prefix="dml-ray-", dir="/tmp") as folder,
        psutil.Popen(
            [
                *command,
                *([f"--address={head}"] if head else ["--head", "--no-monitor", "--include-dashboard=false", f"--temp-dir={folder}"]),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
        ) as process,
    ):
        try:
            yield head or f"127.0.0.1:{ports['port']}", process
        finally:
            for child in process.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()


def listening(*processes: psutil.Process) -> dict[str, set[str]]:
    """Return the addresses at which processes and their descendants listen, by the first word of their command lines."""
    found: dict[str, set[str]] = {}
    for process in (one for first in processes for one in (first, *first.children(recursive=True))):
        with suppress(psutil.Error):
            places = {entry.laddr.ip for entry in process.net_connections("inet") if entry.status == psutil.CONN_LISTEN}
            found.setdefault(process.cmdline()[0], set()).update(places)
    return found
