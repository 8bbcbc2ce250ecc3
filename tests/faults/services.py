"""Faults outside a run: a proxy that returns errors or drops connections, an MLflow server, a disk that fills, a clock that jumps."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
CLOCK = Path(__file__).with_name("clock.c")
Mode = Literal["pass", "503", "away"]


class Proxy:
    """A TCP proxy for an HTTP service of this machine: it passes everything, answers 503 to every request, or drops every connection."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._mode: Mode = "pass"
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: Mode) -> None:
        """Set the mode, and drop the open connections."""
        self._mode = mode
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.set("away")
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            if self._mode == "503":
                caller.recv(65536)
                caller.sendall(UNAVAILABLE)
            elif self._mode == "pass":
                with socket.create_connection(self._target) as service:
                    self._open |= {caller, service}
                    back = threading.Thread(target=_copy, args=(service, caller), daemon=True)
                    back.start()
                    _copy(caller, service)
                    back.join()
                    self._open -= {caller, service}


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class MlflowServer:
    """MLflow's server with database and artifacts in a folder, which a restart finds again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        words = ["server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        places = [
            "--backend-store-uri",
            f"sqlite:///{self._folder / 'mlflow.db'}",
            "--artifacts-destination",
            str(self._folder / "mlartifacts"),
        ]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self._folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *words, *places], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_for_port(self.port, 120)

    def signal(self, number: int) -> None:
        """Send a signal to the server and its worker processes."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def wait_for_port(port: int, seconds: float, host: str = "127.0.0.1") -> None:
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        assert time.monotonic() < until, f"nothing listens on port {port} after {seconds:.0f} s"
        time.sleep(0.2)


class SmallDisk:
    """A file system of limited size, mounted at `folder` in a separate mount namespace: only commands started with `inside` see it."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        mount = f"mount -t tmpfs -o size={megabytes}m none '{folder}' && echo mounted && exec sleep infinity"
        self._keeper = subprocess.Popen(["unshare", "--mount", "sh", "-c", mount], stdout=subprocess.PIPE, text=True)
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "mounted\n", "a tmpfs cannot be mounted here"

    def inside(self, working_folder: Path) -> list[str]:
        """Return the prefix of a command that sees the file system."""
        return ["nsenter", f"--target={self._keeper.pid}", "--mount", f"--wd={working_folder}"]

    @property
    def seen_from_here(self) -> Path:
        return Path(f"/proc/{self._keeper.pid}/root{self._folder}")

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with contextlib.suppress(OSError), (self.seen_from_here / ".filler").open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

    def free(self) -> None:
        (self.seen_from_here / ".filler").unlink(missing_ok=True)

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()


class Clock:
    """The time of day of processes started with `environment`; their monotonic clock is unchanged.

    Debian's libfaketime 0.9.10 is not used: with the monotonic clock unchanged, Python's `time.sleep` fails with EINVAL.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._library = folder / "clock", folder / "clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(CLOCK)], check=True)
        self.jump(0)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "DML_FAULT_CLOCK": str(self._file)}

    def jump(self, seconds: int) -> None:
        """Set the clock to `seconds` after the true time."""
        beside = self._file.with_suffix(".new")
        beside.write_text(str(seconds))
        beside.replace(self._file)
