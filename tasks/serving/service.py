"""The service's HTTP server and its replicas: started, watched and ended here.

The HTTP server is ours (uvicorn with FastAPI), because Serve's proxy accepts bodies of any size before calling our code, and does not limit
the time for headers. It calls one replica in its own process, or several on Ray through Serve's handle.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import torch
import uvicorn
from starlette.types import ASGIApp

from dml_core.errors import ConfigError
from dml_core.index.index import Index
from dml_core.trained import TrainedModel
from tasks.environment import num_cores, ray_address, ray_cluster
from tasks.serving import limits
from tasks.serving.application import Health, make_app
from tasks.serving.guard import Guard, PatientProtocol
from tasks.serving.replica import Replica
from tasks.serving.replicas import Replicas, ServiceError

SHORTEST_TOKEN = 16
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def needs_ray(num_replicas: int | None) -> bool:
    """Return whether Ray has to start the replicas: several of them (None: one per GPU), or any on a cluster."""
    return ray_cluster() is not None or (num_replicas or torch.cuda.device_count()) > 1


def run_service(
    folder: Path,
    model: TrainedModel,
    index: Index | None,
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
        folder: folder of the network; replicas on Ray open it again.
        port: 0 means any free one.
        num_replicas: copies of the network; None is one per GPU of this machine, or one.
        max_batch: maximum number of images per forward pass; 1 disables batching.
        token: token that requests must contain, or None.
        report: receives the service's address, once it answers.

    Raises:
        ConfigError: the host is not loopback and no token is set, or the port is in use.
        ServiceError: Ray or the replicas do not start.
    """
    with listen(host, port, token) as listener, _replicas(folder, model, index, num_replicas, max_batch) as replicas:
        app = make_app(describe_service(model, index), replicas, has_token=token is not None)
        asyncio.run(serve_http(Guard(app, token, host_names(host, listener) if token is None else None), listener, report))


def host_names(host: str, listener: socket.socket) -> frozenset[str]:
    """Return the names that requests to a service on loopback may use: the local ones, `--host`, and the address that is printed."""
    return LOCAL_NAMES | {host.lower(), shown_host(listener)}


def shown_host(listener: socket.socket) -> str:
    """Return the address of a listening socket as it is in URLs."""
    address = str(listener.getsockname()[0])
    return f"[{address}]" if ":" in address else address


def describe_service(model: TrainedModel, index: Index | None) -> Health:
    """Return facts about a service; an index keeps its metric when that of the network is changed in params.yaml."""
    return Health(
        model=model.identity,
        title=model.title,
        num_dimensions=model.num_dimensions,
        metric=model.metric if index is None else index.metric,
        num_items=None if index is None else index.num_items,
        index=None if index is None else index.info.version,
    )


@contextmanager
def _replicas(folder: Path, model: TrainedModel, index: Index | None, num_replicas: int | None, max_batch: int) -> Iterator[Replicas]:
    """Start the replicas, and end them afterwards."""
    if not needs_ray(num_replicas):
        yield Replicas(Replica(model, index, num_cores(), max_batch))
        return
    from tasks.serving.ray_replicas import start_replicas, stop_replicas  # takes seconds to import

    address = ray_address()
    try:
        yield start_replicas(folder, model, index, num_replicas, max_batch, address)
    finally:
        stop_replicas(address)


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """Return the listening socket for clients; no request is answered yet.

    Raises:
        ConfigError: it would be open to others without a token, or cannot be opened.
    """
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"the token has {len(token)} characters; at least {SHORTEST_TOKEN} are required")
    if token is not None and token != token.strip():
        raise ConfigError("the token begins or ends with white space, which no client can send; remove it")
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
        self._report(f"http://{shown_host(sockets[0])}:{sockets[0].getsockname()[1]}")


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
        timeout_keep_alive=75,  # longer than proxies keep unused connections, often 60 s: one that closes first costs them a request
        timeout_graceful_shutdown=limits.DRAIN_SECONDS,
    )
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    try:
        await _Server(config, report).serve([listener])
    except OSError as error:
        raise ServiceError(f"the HTTP server cannot listen ({error.strerror or error}); start it again") from error
