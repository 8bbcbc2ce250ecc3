"""The service's HTTP server and its replicas: started, watched and ended here.

The HTTP server is ours (uvicorn with FastAPI), because Serve's proxy accepts bodies of any size before calling our code, and does not limit
the time for headers. It calls the replicas through Serve's handle.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import ray
import uvicorn
from ray import serve
from starlette.types import ASGIApp

from dml_core.errors import ConfigError
from tasks.environment import ray_cluster
from tasks.serving.application import Served, make_app
from tasks.serving.guard import Guard, PatientProtocol
from tasks.serving.replicas import DRAIN_SECONDS, ServiceError, start_replicas

SHORTEST_TOKEN = 16
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def run_service(
    model: Path,
    index: Path | None,
    served: Served,
    *,
    host: str,
    port: int,
    num_replicas: int | None,
    max_batch: int,
    token: str | None,
    report: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM, then stop everything.

    Args:
        model: folder of the network.
        index: folder of the index, or None.
        served: facts about both for clients.
        host: address to listen at.
        port: port to listen at; 0 means any free one.
        num_replicas: copies of the network; None is one per GPU, or one.
        max_batch: maximum number of images per forward pass; 1 disables batching.
        token: token that requests must contain, or None.
        report: receives the service's address, once it answers.

    Raises:
        ConfigError: the host is not loopback and no token is set, or the port is in use.
        ServiceError: Ray or the replicas do not start.
    """
    with listen(host, port, token) as listener:
        address, name = ray_cluster() or "local", f"dml-serve-{os.getpid()}"
        try:
            app = make_app(served, start_replicas(model, index, num_replicas, max_batch, address, name))
            hosts = LOCAL_NAMES | {host} if token is None else None
            asyncio.run(serve_http(Guard(app, token, hosts), listener, report))
        finally:
            if ray.is_initialized():
                if address != "local":
                    with suppress(Exception):
                        serve.delete(name)
                ray.shutdown()


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """Return the listening socket for clients; no request is answered yet.

    Raises:
        ConfigError: it would be open to others without a token, or cannot be opened.
    """
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"the token has {len(token)} characters; at least {SHORTEST_TOKEN} are required")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError):
        raise ConfigError(f"--host {host} --port {port}: not an address of this machine") from None
    if token is None and not ip_address(place[0]).is_loopback:
        raise ConfigError(
            f"--host {host}: other machines could connect; set a token in the environment first (--token-env names the variable)"
        )
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # with this protocol asyncio sets TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{host}:{port}: cannot listen there ({error.strerror}); choose another --port") from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server, which reports its address as soon as it answers."""

    def __init__(self, config: uvicorn.Config, report: Callable[[str], None]) -> None:
        super().__init__(config)
        self._report = report

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer at the sockets, and report the address of the first."""
        await super().startup(sockets)
        assert sockets is not None
        host, port = sockets[0].getsockname()[:2]
        self._report(f"http://{f'[{host}]' if ':' in host else host}:{port}")


async def serve_http(app: ASGIApp, listener: socket.socket, report: Callable[[str], None]) -> None:
    """Answer clients until SIGINT or SIGTERM; requests in progress are answered before the end.

    Raises:
        ServiceError: the HTTP server does not start.
    """
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    try:
        await _Server(config, report).serve([listener])
    except OSError as error:
        raise ServiceError(f"the HTTP server cannot listen ({error.strerror or error}); start it again") from error
