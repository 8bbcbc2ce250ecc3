"""DVC's stages run `dml` in forked processes: a separate process would spend four seconds on imports."""

import socketserver
import sys
from collections.abc import Iterator
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from threading import Thread

import pytest

from tests.forked import dml

SHELL = """#!/bin/sh
dml() {{ '{python}' -ISc '
import os, socket, sys
test = socket.create_connection(("127.0.0.1", {port}))
test.sendall(b"%d\\n" % os.getpid())
sys.exit(int(test.recv(3)))
' "$@"; }}
eval "$2"
"""


class Stage(socketserver.StreamRequestHandler):
    """Runs `dml` with the words, folder, environment and outputs of the process that asks for it, which ends with the same code."""

    def handle(self) -> None:
        """Answer one process."""
        process = Path("/proc", self.rfile.readline().decode().strip())
        words, variables = ((process / name).read_text().split("\0")[:-1] for name in ("cmdline", "environ"))
        environment = dict(variable.split("=", 1) for variable in variables)
        ran = dml(words[3:], (process / "cwd").readlink(), **environment)
        for number, text in enumerate((ran.stdout, ran.stderr), start=1):
            with (process / f"fd/{number}").open("a") as output:
                output.write(text)
        self.wfile.write(b"%d" % ran.returncode)


@pytest.fixture(scope="module")
def forked_stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A shell for DVC ($SHELL) that knows `dml` as a function."""
    ensure_running()  # here, because it finds modules from the working folder
    shell = tmp_path_factory.mktemp("shell") / "sh"
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Stage) as server, pytest.MonkeyPatch.context() as patch:
        shell.write_text(SHELL.format(python=sys.executable, port=server.server_address[1]))
        shell.chmod(0o755)
        patch.setenv("SHELL", str(shell))
        Thread(target=server.serve_forever).start()
        yield
        server.shutdown()
