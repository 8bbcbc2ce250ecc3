"""The service's processes: replicas on Ray Serve, and an HTTP server in this process; started, watched and ended here.

Ray Serve manages the replicas: their number, routing, and the restart of those that die. The HTTP server is ours (uvicorn with FastAPI),
because Serve's proxy accepts bodies of any size before calling our code, and does not limit the time for headers. It calls the replicas
through Serve's handle.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import ray
import uvicorn
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.schema import LoggingConfig

from dml_core.errors import ConfigError, DmlError
from tasks.environment import ray_cluster
from tasks.serving.application import Served, make_app
from tasks.serving.guard import Guard, Measures, PatientProtocol
from tasks.serving.limits import Limits, RefusedError
from tasks.serving.replica import Answer, Hit, Replica

NUM_ATTEMPTS = 5
AGAIN_SECONDS = 0.2
CHECK_SECONDS = 5.0
DRAIN_SECONDS = 5  # for requests in progress when the service ends
SHORTEST_TOKEN = 16
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class ServiceError(DmlError):
    """The service cannot be started."""


@dataclass(frozen=True)
class Setting:
    """Settings of a service.

    Attributes:
        model: folder of the network.
        index: folder of the index, or None.
        served: facts about both for clients.
        host, port: address to listen at; port 0 means any free port.
        replicas: copies of the network; None is one per GPU, or one.
        max_batch: maximum number of images per forward pass; 1 disables batching.
        token: token that requests must contain, or None.
        limits: limits on a request.
    """

    model: Path
    index: Path | None
    served: Served
    host: str = "127.0.0.1"
    port: int = 8321
    replicas: int | None = None
    max_batch: int = 32
    token: str | None = None
    limits: Limits = field(default_factory=Limits)


def run_service(setting: Setting, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then stop everything.

    Args:
        setting: settings of the service.
        say: receives the service's address, once it answers.

    Raises:
        ConfigError: the host is not loopback and no token is set, or the port is in use.
        ServiceError: Ray or the replicas do not start.
    """
    listener = listen(setting)
    with listener:
        address = ray_cluster() or "local"
        name = f"dml-serve-{os.getpid()}"
        try:
            backend = _start_replicas(setting, address, name)
            asyncio.run(_answer(setting, backend, listener, say))
        finally:
            if ray.is_initialized():
                if address != "local":
                    with suppress(Exception):
                        serve.delete(name)
                ray.shutdown()


def listen(setting: Setting) -> socket.socket:
    """Return the listening socket for clients; no request is answered yet.

    Raises:
        ConfigError: it would be open to others without a token, or cannot be opened.
    """
    if setting.token is not None and len(setting.token) < SHORTEST_TOKEN:
        raise ConfigError(f"the token has {len(setting.token)} characters; at least {SHORTEST_TOKEN} are required")
    try:
        family, _, _, _, place = socket.getaddrinfo(setting.host, setting.port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError):
        raise ConfigError(f"--host {setting.host} --port {setting.port}: not an address of this machine") from None
    if setting.token is None and not ip_address(place[0]).is_loopback:
        raise ConfigError(
            f"--host {setting.host}: other machines could connect; set a token in the environment first (--token-env names the variable)"
        )
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # with this protocol asyncio sets TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{setting.host}:{setting.port}: cannot listen there ({error.strerror}); choose another --port") from None
    return listener


def _start_replicas(setting: Setting, address: str, name: str) -> "Replicas":
    """Connect to Ray or start it, and start the replicas on it.

    Raises:
        ServiceError: they do not start.
    """
    for logger in ("ray", "ray.serve"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
        resources = ray.cluster_resources()
        num_gpus, num_cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        num_replicas = setting.replicas or max(1, num_gpus)
        num_threads = max(1, num_cores // num_replicas)
        # Ray would set OpenMP to one core, and a program can change that only for its calling thread.
        environment = {"env_vars": {"OMP_NUM_THREADS": str(num_threads)}}
        deployment = serve.deployment(Replica).options(
            num_replicas=num_replicas,
            max_ongoing_requests=setting.limits.requests,
            health_check_period_s=2,
            graceful_shutdown_timeout_s=DRAIN_SECONDS,
            ray_actor_options={
                "num_cpus": min(1.0, num_cores / (num_replicas + 1)),
                "num_gpus": min(1.0, num_gpus / num_replicas),
                "runtime_env": environment,
            },
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
        application = deployment.bind(
            str(setting.model.absolute()),
            str(setting.index.absolute()) if setting.index is not None else None,
            num_threads,
            setting.max_batch,
            address == "local",
        )
        serve.start(proxy_location="Disabled")
        handle = serve.run(application, name=name, route_prefix=None)
    except Exception as error:  # Ray and Serve raise plain exceptions
        line = next((line for line in reversed(str(error).strip().splitlines()) if line.strip()), type(error).__name__)
        raise ServiceError(f"the replicas did not start: {line.strip()}") from error
    return Replicas(handle, setting.limits)


class Replicas:
    """The replicas, called through Serve's handle. A request whose replica dies is sent to another, as requests change nothing."""

    def __init__(self, handle: Any, limits: Limits) -> None:
        self._handle = handle
        self._limits = limits
        self.measures = Measures()

    async def embed(self, images: list[bytes]) -> Any:
        """Return embeddings, float32 (N, D).

        Raises:
            RefusedError: an image cannot be decoded (422), or no replica answers in time (503).
        """
        return (await self._answer(images, 0, False)).embeddings

    async def search(self, images: list[bytes], k: int, with_thumbnails: bool) -> tuple[tuple[Hit, ...], ...]:
        """Return the neighbours of each image, nearest first.

        Raises:
            RefusedError: as `embed`.
        """
        return (await self._answer(images, k, with_thumbnails)).hits

    async def check(self) -> bool:
        """Return whether a replica answers."""
        try:
            return bool(await asyncio.wait_for(self._handle.check.remote(), CHECK_SECONDS))
        except (TimeoutError, RayActorError, DeploymentUnavailableError):
            return False

    async def _answer(self, images: list[bytes], k: int, with_thumbnails: bool) -> Answer:
        try:
            async with asyncio.timeout(self._limits.answer_seconds):
                answer = await self._ask(images, k, with_thumbnails)
        except TimeoutError:
            raise RefusedError(503, f"no answer within {self._limits.answer_seconds:g} s; retry later") from None
        if answer.refused is not None:
            raise RefusedError(422, answer.refused)
        self.measures.images.inc(len(images))
        for size in answer.batch_sizes:
            self.measures.batches.observe(size)
        return answer

    async def _ask(self, images: list[bytes], k: int, with_thumbnails: bool) -> Answer:
        for _ in range(NUM_ATTEMPTS):
            try:
                answer: Answer = await self._handle.answer.remote(images, k, with_thumbnails)
                return answer
            except RayActorError:
                self.measures.retries.inc()
                await asyncio.sleep(AGAIN_SECONDS)
            except (BackPressureError, DeploymentUnavailableError):
                break
        raise RefusedError(503, "no replica is available at the moment; retry later")


async def _answer(setting: Setting, backend: Replicas, listener: socket.socket, say: Callable[[str], None]) -> None:
    """Answer clients until a signal arrives.

    Raises:
        ServiceError: the HTTP server does not start, or ends before the signal.
    """
    app = make_app(setting.served, backend, setting.limits, backend.measures)
    hosts = None if setting.token is not None else LOCAL_NAMES | {setting.host}
    PatientProtocol.head_seconds = setting.limits.head_seconds
    config = uvicorn.Config(
        Guard(app, setting.limits, setting.token, hosts, backend.measures),
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
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    serving = loop.create_task(server._serve([listener]))  # not `serve`, which handles the signals and raises them again at the end
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        host, port = listener.getsockname()[:2]
        say(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    told = loop.create_task(ending.wait())
    await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    server.should_exit = True
    try:
        await serving
    except OSError as error:
        raise ServiceError(f"the HTTP server cannot listen ({error.strerror or error}); start it again") from error
    if not ending.is_set():
        raise ServiceError("the HTTP server ended unexpectedly; start it again")
