"""The services of infra/compose.yaml as containers of crun, each in its own network namespace on one bridge. Needs root and iproute2.

The file is read, not repeated. What differs from Docker: see containers.py; PostgreSQL is Debian's, with a start that does what that of
the official image does; a service that ends is started again within a second.
"""

import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT
from tests.e2e.containers import Container, Image, bound, tmpfs
from tests.faults.hosts import _end, _ip, _namespace

NETWORK = "10.78.0"
S3 = ("s3", 5555)
# The official image's start: the first one makes the databases as root tells, then it becomes the server.
START_POSTGRES = """
export PATH=/usr/lib/postgresql/15/bin:$PATH PGDATA=/var/lib/postgresql/data/pgdata
if [ ! -s $PGDATA/PG_VERSION ]; then
  echo "$POSTGRES_PASSWORD" | initdb -D $PGDATA -U "$POSTGRES_USER" --auth=scram-sha-256 --pwfile=/dev/stdin -E UTF8 > /dev/null
  echo "host all all all scram-sha-256" >> $PGDATA/pg_hba.conf
  for line in "CREATE DATABASE $POSTGRES_DB" "$(cat /docker-entrypoint-initdb.d/*.sql)"; do
    echo "$line" | postgres --single -D $PGDATA postgres > /dev/null
  done
fi
exec "$@" -D $PGDATA -c listen_addresses='*' -c unix_socket_directories=/tmp
"""


def user_of(image: Image, name: str) -> int:
    """Return the number of a user of an image."""
    lines = (image.root / "etc/passwd").read_text().splitlines()
    return next(int(line.split(":")[2]) for line in lines if line.startswith(f"{name}:"))


class Services:
    """The services, started in the order of `depends_on`, until `close`.

    Args:
        folder: an empty folder for volumes, logs and definitions.
        images: images by the names that the file uses.
        variables: the variables of `.env`.
        replaced: files of the machine by their place in each container, for example a smaller params.yaml.
    """

    def __init__(self, folder: Path, images: Mapping[str, Image], variables: Mapping[str, str], replaced: Mapping[str, Path]) -> None:
        self.folder, self._images, self._replaced = folder, images, replaced
        text = (ROOT / "infra" / "compose.yaml").read_text()
        filled = re.sub(r"\$\{(\w+):[?-]\}", lambda found: variables.get(found[1], ""), text)
        self.file = yaml.safe_load(filled.replace("$$", "$"))
        self.services: dict[str, Any] = self.file["services"]
        self._switch = _namespace("--net")
        _ip(self._switch, "link", "add", "bridge", "type", "bridge")
        _ip(self._switch, "link", "set", "bridge", "up")
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate([S3[0], *self.services], 1)}
        self._keepers = {name: self._plug(name, address) for name, address in self.addresses.items()}
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in self.addresses.items()) + "127.0.0.1 localhost\n")
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once; nobody answers elsewhere
        self.containers: dict[str, Container] = {}
        self.starts: dict[str, int] = {}
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._restart)
        moto = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(S3[1])]
        inside = ["nsenter", f"--target={self._keepers[S3[0]].pid}", "--net"]
        with (folder / "s3.txt").open("w") as printed:
            self._s3 = subprocess.Popen([*inside, *moto], stdout=printed, stderr=printed)

    def _plug(self, name: str, address: str) -> subprocess.Popen[str]:
        """Return the process that keeps a network namespace with this address on the bridge."""
        keeper, link = _namespace("--net"), f"to{address.rpartition('.')[2]}"
        _ip(self._switch, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(keeper.pid))
        _ip(self._switch, "link", "set", link, "master", "bridge", "up")
        _ip(keeper, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip(keeper, "link", "set", device, "up")
        _ip(keeper, "route", "add", "default", "via", f"{NETWORK}.254")  # nobody is there; Ray takes its address from the route
        return keeper

    # ------------------------------------------------------------ start

    def up(self) -> None:
        """Start every service when those it depends on are in the state it asks for."""
        self._watcher.start()
        for name in self._in_order():
            needs = self.services[name].get("depends_on", {})
            for needed, how in needs.items() if isinstance(needs, dict) else ((each, {}) for each in needs):
                self._wait(needed, how.get("condition", "service_started"))
            self._start(name)

    def _in_order(self) -> Iterator[str]:
        placed: list[str] = []
        while len(placed) < len(self.services):
            for name, service in self.services.items():
                if name not in placed and set(service.get("depends_on", ())) <= set(placed):
                    placed.append(name)
                    yield name

    def _wait(self, name: str, condition: str) -> None:
        until = time.monotonic() + 600
        while not self._is(name, condition):
            assert time.monotonic() < until, f"{name} is not {condition}: {self.containers[name].log.read_text()[-4000:]}"
            time.sleep(1)

    def _is(self, name: str, condition: str) -> bool:
        if condition == "service_completed_successfully":
            return self.containers[name].exit_code() == 0
        if condition == "service_healthy":
            kind, *words = self.services[name]["healthcheck"]["test"]
            command = ["sh", "-c", words[0].replace("pg_isready", "pg_isready -h 127.0.0.1")] if kind == "CMD-SHELL" else words
            return self.containers[name].execute(*command).returncode == 0
        return name in self.containers

    def _start(self, name: str) -> None:
        service = self.services[name]
        image = self._images[service["image"]]
        folder = self.folder / name / str(self.starts.get(name, 0))
        places: dict[str, Path] = {f"/etc/{file}": self.folder / file for file in ("hosts", "resolv.conf")}
        places |= self._replaced if service["image"].startswith("dml-") else {}
        for volume in service.get("volumes", ()):
            source, place = volume.split(":") if ":" in volume else (f"{name}{volume.replace('/', '-')}", volume)
            places[place] = self._volume(source, place, image)
        for config in service.get("configs", ()):
            path = self.folder / f"{config['source']}.txt"
            path.write_text(self.file["configs"][config["source"]]["content"])
            places[config["target"]] = path
        command = shlex.split(service["command"])
        is_postgres = name == "postgres"
        self.containers[name] = Container(
            f"dml-{name}-{os.getpid()}",
            image,
            folder,
            ["bash", "-ec", START_POSTGRES, "start", *command] if is_postgres else command,
            {key: str(value) for key, value in service.get("environment", {}).items()},
            [*(bound(path, place) for place, path in places.items()), *map(tmpfs, service.get("tmpfs", ["/tmp"]))],
            network=f"/proc/{self._keepers[name].pid}/ns/net",
            user=user_of(image, "postgres") if is_postgres else 1000,
            read_only=service.get("read_only", False),
            shm=service.get("shm_size", "64m").removesuffix("b"),
        )
        self.containers[name].start()
        self.starts[name] = self.starts.get(name, 0) + 1

    def _volume(self, name: str, place: str, image: Image) -> Path:
        path = self.folder / "volumes" / name
        if not path.exists():
            image.new_volume(path, place)
            if place.startswith("/var/lib/postgresql"):
                user = user_of(image, "postgres")
                os.chown(path, user, user)
        return path

    def _restart(self) -> None:
        """Start what has ended again, as its `restart` asks."""
        while not self._closing.wait(1):
            for name, container in list(self.containers.items()):
                code, policy = container.exit_code(), self.services[name].get("restart", "no")
                if code is not None and (policy == "unless-stopped" or (policy == "on-failure" and code != 0)):
                    container.close()
                    self._start(name)

    # ------------------------------------------------------------ use

    def python(self, service: str, code: str, *arguments: str) -> str:
        """Run Python in a service's container and return what it printed."""
        ran = self.containers[service].execute("python3", "-c", code, *arguments)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return ran.stdout

    def kill(self, name: str) -> None:
        """Send SIGKILL to a service; it is started again."""
        count = self.starts[name]
        self.containers[name].kill()
        until = time.monotonic() + 60
        while self.starts[name] == count:
            assert time.monotonic() < until, f"{name} was not started again"
            time.sleep(0.2)

    def text(self, name: str) -> str:
        """Return everything a service has printed, of all its starts."""
        return "".join(path.read_text(errors="replace") for path in sorted((self.folder / name).rglob("log.txt")))

    def close(self) -> None:
        """End every service, and remove the networks."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for container in self.containers.values():
            container.close()
        self._s3.kill()
        self._s3.wait()
        for keeper in (*self._keepers.values(), self._switch):
            _end(keeper)
