"""The Prefect server of one flow, on a machine where no server is named.

Prefect would start it, but only after the flow's process has loaded the whole server, and its database is created by running all
of Prefect's migrations. Here it is the command's first process, so that it loads on one core while the flow's libraries load on another.
It has a temporary folder with a copy of this user's empty database (`flows.local_database`).
"""

import atexit
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path

from dml_core.errors import TrainingError
from flows.local_database import copy_empty_database, keep_created_database

START_SECONDS, END_SECONDS = 300, 5  # on a busy machine; a server that has ended is noticed at once
ONE_FLOW = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "none",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}


class LocalServer:
    """A server in a separate process, which ends with this one. Its port is bound before it starts, so that no other can take it.

    Attributes:
        url: address of its API.
        login: "user:password", without which it answers neither other users of this machine nor pages in a browser.
    """

    def __init__(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as listening:
            self._port = listening.getsockname()[1]
            self.url = f"http://127.0.0.1:{self._port}/api"
            self.login = f"dml:{secrets.token_hex(16)}"
            self._home = _new_folder()
            words = [sys.executable, "-m", __name__, str(listening.fileno()), self._home]
            environment = os.environ | ONE_FLOW | {"PREFECT_HOME": self._home, "PREFECT_SERVER_API_AUTH_STRING": self.login}
            self._process = subprocess.Popen(words, env=environment, pass_fds=[listening.fileno()])
        atexit.register(self.stop)

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
            TrainingError: it ended, or did not answer in time.
        """
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=START_SECONDS)) as connection:
                connection.request("GET", "/api/health")
                if (status := connection.getresponse().status) != 200:
                    raise http.client.HTTPException(f"status {status}")
        except (OSError, http.client.HTTPException) as error:
            raise TrainingError(f"Prefect's server did not start ({error}); rerun the command, or set PREFECT_API_URL") from None

    def stop(self) -> None:
        """End it, and remove its folder."""
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)


def _new_folder() -> str:
    """Create and return a folder, in that of the flow's Ray if possible, which is removed however the flow ends."""
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="dml-prefect-", dir=os.environ.get("RAY_TMPDIR") or None)
    return tempfile.mkdtemp(prefix="dml-prefect-")


def serve(listening: int, home: Path) -> None:
    """Serve Prefect's API on a socket that already listens; requests that came before the start are answered then.

    At its end it removes its folder, `home`, because the flow may have been killed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # called after the server's own handler
    try:
        is_copied = copy_empty_database(home)
        import uvicorn
        from prefect.server.api.server import create_app

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if not is_copied:
                    keep_created_database(home)

        with socket.socket(fileno=listening) as server_socket:
            Server(uvicorn.Config(create_app(), log_level="error", lifespan="on")).run(sockets=[server_socket])
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    with suppress(SystemExit):
        serve(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # Python would unload Prefect for a second, for which the command waits
