"""Images built by buildah and containers run by crun, an OCI runtime, without a daemon and cgroups. Needs root and these programs.

What differs from Docker: no limits of memory and CPU; names of other containers are in /etc/hosts instead of a DNS server; no port is
published. A volume is a folder; it begins with the owner and mode of the image's folder, as Docker's.
"""

import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

import psutil

from tests.conftest import ROOT

PROGRAMS = ("buildah", "debootstrap", "crun")
UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists", "var/log")  # as in debian:12-slim
PROJECT = "/srv/dml"
# crun refuses hosts with both versions of cgroups, even if it is not to use them.
WITHOUT_CGROUPS = 'umount /sys/fs/cgroup/unified 2>/dev/null; mount -t tmpfs none /sys/fs/cgroup; exec "$@"'


def can_build() -> bool:
    """Return True if images can be built and run here."""
    return os.geteuid() == 0 and all(map(which, PROGRAMS))


def is_ours(folder: Path) -> bool:
    """Return True if a folder belongs to the image's user."""
    return folder.stat().st_uid == 1000


def make_debian(system: Path, *packages: str) -> Path:
    """Install Debian 12 with these packages into a folder, and return it."""
    included = [f"--include={','.join(packages)}"] if packages else []
    subprocess.run(["debootstrap", "--variant=minbase", *included, "bookworm", str(system)], check=True, capture_output=True)
    for name in UNUSED:
        shutil.rmtree(system / name, ignore_errors=True)
        (system / name).mkdir()
    for name in ("hostname", "resolv.conf"):  # this machine's
        (system / "etc" / name).write_text("")
    return system


@dataclass(frozen=True)
class Images:
    """A store of images in a folder."""

    folder: Path

    def buildah(self, *words: str) -> str:
        """Run buildah on this store and return what it prints.

        Raises:
            RuntimeError: it failed.
        """
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        places = ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run"), "--storage-driver", "overlay"]
        environment = os.environ | {"TMPDIR": str(self.folder / "tmp")}
        ran = subprocess.run(["buildah", *places, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise RuntimeError(f"buildah {words[0]}: {ran.stdout[-3000:]}{ran.stderr[-3000:]}")
        return ran.stdout.strip()

    def make_base(self, tag: str = "localhost/bookworm") -> str:
        """Make a base image of Debian 12, and return its name."""
        system = make_debian(self.folder / "bookworm")
        container = self.buildah("from", "scratch")
        self.buildah("add", container, str(system), "/")
        self.buildah("commit", "--rm", container, tag)
        shutil.rmtree(system)
        return tag

    def build(self, tag: str, base: str, left_out: str) -> None:
        """Build infra/Dockerfile. The certificates with which the package registry is reached are mounted, not copied."""
        host = self.folder / "host"
        (host / "ssl").mkdir(parents=True, exist_ok=True)
        certificates = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
        shutil.copy(certificates, host / "ssl" / "cert.pem")
        (host / "pip.conf").write_text("[global]\ncert = /usr/local/ssl/cert.pem\n")
        # Packages are verified by the lock's hashes.
        (host / "uv.toml").write_text(f"allow-insecure-host = {os.environ.get('UV_INSECURE_HOST', '').split()}\n")
        mounts = {"ssl": "/usr/local/ssl", "pip.conf": "/etc/pip.conf", "uv.toml": "/etc/uv/uv.toml"}
        words = [word for name, target in mounts.items() for word in ("--volume", f"{host / name}:{target}:ro")]
        words += ["--build-arg", f"BASE={base}", "--build-arg", f"LEFT_OUT={left_out}", "--ignorefile", "infra/Dockerfile.dockerignore"]
        words += ["--isolation", "chroot", "--layers", "--timestamp", "0", "--pull-never", "--file", "infra/Dockerfile", "--tag", tag]
        self.buildah("bud", *words, ".")

    def mount(self, tag: str) -> "Image":
        """Return the files and settings of an image."""
        container = self.buildah("from", "--pull-never", tag)
        config = json.loads(self.buildah("inspect", "--type", "image", tag))["OCIv1"]["config"]
        return Image(Path(self.buildah("mount", container)), config)

    def close(self) -> None:
        """Remove all containers and images."""
        self.buildah("rm", "--all")
        shutil.rmtree(self.folder / "storage", ignore_errors=True)


@dataclass(frozen=True)
class Image:
    """The mounted files and the configuration of an image."""

    root: Path
    config: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the image sets."""
        return dict(entry.split("=", 1) for entry in self.config.get("Env", ()))

    def new_volume(self, folder: Path, place: str) -> Path:
        """Make the folder of a volume at this place of a container, with the owner and mode of the image's folder there."""
        folder.mkdir(parents=True, exist_ok=True)
        of = self.root / place.lstrip("/")
        state = of.stat() if of.is_dir() else self.root.stat()
        os.chown(folder, state.st_uid, state.st_gid)
        folder.chmod(state.st_mode & 0o7777)
        return folder


def tmpfs(place: str, *options: str) -> dict[str, Any]:
    """Return the mount of an empty file system in memory."""
    return {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", *(options or ("mode=1777",))]}


def bound(source: Path, place: str) -> dict[str, Any]:
    """Return the mount of a folder or file of the machine."""
    return {"destination": place, "type": "bind", "source": str(source), "options": ["rbind", "rw"]}


class Container:
    """A command in an image, as a user without capabilities. Starts with `start`.

    Args:
        name: unique name.
        image: what it runs.
        folder: an empty folder for its definition and its log.
        command: the words of the command.
        environment: variables in addition to those of the image.
        mounts: see `tmpfs` and `bound`.
        network: path of a network namespace; by default a new one with nothing but the loopback device down.
        user: number of user and group.
        read_only: whether the image's files cannot be written.
        shm: size of /dev/shm.
    """

    def __init__(
        self,
        name: str,
        image: Image,
        folder: Path,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        mounts: Sequence[dict[str, Any]] = (),
        network: str | None = None,
        user: int = 1000,
        read_only: bool = True,
        shm: str = "64m",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.log, self._folder = name, folder / "log.txt", folder
        self._place, self._user = image.config.get("WorkingDir") or "/", f"{user}:{user}"
        subprocess.run(["crun", "spec", "--bundle", str(folder)], check=True, capture_output=True)
        path = folder / "config.json"
        spec = json.loads(path.read_text())
        spec["root"] = {"path": str(image.root), "readonly": read_only}
        spec["hostname"] = name
        variables = image.environment | dict(environment or {})
        _, num_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        spec["process"] |= {
            "args": list(command),
            "env": [f"{key}={value}" for key, value in variables.items()],
            "cwd": self._place,
            "user": {"uid": user, "gid": user},
            "terminal": False,
            "noNewPrivileges": True,
            "capabilities": {},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": num_files, "soft": num_files}],
        }
        kept = [mount for mount in spec["mounts"] if not mount["type"].startswith("cgroup") and mount["destination"] != "/dev/shm"]
        shared = tmpfs("/dev/shm", "mode=1777", f"size={shm}")
        spec["mounts"] = [*kept, shared, *sorted(mounts, key=lambda mount: str(mount["destination"]))]
        spec["linux"].pop("resources", None)
        network_of = {"type": "network"} | ({"path": network} if network else {})
        others = [entry for entry in spec["linux"]["namespaces"] if entry["type"] not in ("network", "cgroup")]
        spec["linux"]["namespaces"] = [*others, network_of]
        path.write_text(json.dumps(spec))
        self._process: subprocess.Popen[bytes] | None = None

    def _crun(self, *words: str) -> list[str]:
        crun = ["crun", "--root", str(self._folder / "crun"), "--cgroup-manager=disabled", *words]
        return ["unshare", "--mount", "sh", "-c", WITHOUT_CGROUPS, "sh", *crun]

    def start(self) -> None:
        """Start the command; what it prints is in `log`. Returns when the container accepts further commands, or has ended."""
        with self.log.open("ab") as printed:
            words = self._crun("run", "--bundle", str(self._folder), self.name)
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)
        while self._process.poll() is None and not (self._folder / "crun" / self.name / "status").exists():
            time.sleep(0.1)

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end of the command and return its exit code."""
        assert self._process is not None
        return self._process.wait(seconds)

    def exit_code(self) -> int | None:
        """Return the exit code of the command, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def run(self) -> str:
        """Run the command to its end, which must be good, and return what it printed."""
        self.start()
        code = self.wait()
        printed = self.log.read_text()
        assert code == 0, printed[-5000:]
        return printed

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run another command in the running container, as its user."""
        words = self._crun("exec", "--cwd", self._place, "--user", self._user, self.name, *command)
        return subprocess.run(words, capture_output=True, text=True, check=False)

    def kill(self) -> None:
        """Send SIGKILL to the first process of the container, with which all others end."""
        subprocess.run(self._crun("kill", self.name, "KILL"), capture_output=True, check=False)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the container; none once it has ended."""
        if self._process is None or self._process.poll() is not None:
            return []
        return psutil.Process(self._process.pid).children(recursive=True)

    def close(self) -> None:
        """End the container and remove what crun keeps of it."""
        if self._process is not None:
            if self._process.poll() is None:
                self.kill()
            self._process.wait(60)
            subprocess.run(self._crun("delete", "--force", self.name), capture_output=True, check=False)
