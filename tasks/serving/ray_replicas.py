"""Replicas on Ray Serve, which manages their number, routing and restarts."""

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.schema import LoggingConfig
from starlette.exceptions import HTTPException

from dml_core.errors import ConfigError
from dml_core.index.index import Index
from dml_core.trained import TrainedModel, load_model
from tasks.environment import answers, num_cores, shown
from tasks.serving import limits, metrics
from tasks.serving.replica import Answer, Replica
from tasks.serving.replicas import CHECK_SECONDS, Replicas, ServiceError

NUM_ATTEMPTS = 5
AGAIN_SECONDS = 0.2
LOOK_SECONDS = 15.0  # between looks of a replica whether its service lives


class RayReplica(Replica):
    """A replica in a process of Ray, which opens network and index itself, from their folders.

    Args:
        versions: identity of the network, hash of its file and version of the index that the service was started with.

    Raises:
        ConfigError: a folder has another network or version now; its answers would not fit those of the other replicas.
    """

    def __init__(self, model: str, index: str | None, versions: tuple[str | None, ...], num_threads: int, max_batch: int) -> None:
        _listen_on_the_node_s_address()
        network, opened = load_model(model), Index.open(Path(index)) if index is not None else None
        found = (network.identity, network.description.file_sha256, opened and opened.info.version)
        if found != versions:
            raise ConfigError(f"{model if found[:2] != versions[:2] else index}: changed since the service started; start it again")
        super().__init__(network, opened, num_threads, max_batch)
        self._looked = time.monotonic()

    async def check_health(self) -> None:
        """Raise an error if the replica cannot compute: Serve, which calls this by its name, then replaces it."""
        if not await self.check():
            raise RuntimeError("computations fail")
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            await asyncio.to_thread(_end_if_the_service_died)


class RayReplicas(Replicas):
    """Replicas that are called through Serve's handle. A request whose replica dies is sent to another, as requests change nothing."""

    async def check(self) -> bool:
        """Return whether a replica answers and can compute."""
        try:
            return bool(await asyncio.wait_for(self._replica.check.remote(), CHECK_SECONDS))
        except (TimeoutError, RayActorError, BackPressureError, DeploymentUnavailableError):
            return False

    async def _call(self, method: str, *arguments: Any) -> Answer:
        for _ in range(NUM_ATTEMPTS):
            try:
                answer: Answer = await getattr(self._replica, method).remote(*arguments)
                return answer
            except RayActorError:
                metrics.RETRIES.inc()
                await asyncio.sleep(AGAIN_SECONDS)
            except (BackPressureError, DeploymentUnavailableError):
                break
        raise HTTPException(503, "no replica is available at the moment; retry later")


def start_replicas(
    folder: Path, model: TrainedModel, index: Index | None, num_replicas: int | None, max_batch: int, address: str
) -> RayReplicas:
    """Connect to the Ray cluster at `address`, or start Ray if it is "local", and start the replicas on it.

    `num_replicas` is by default one per GPU of a Ray on this machine; on a cluster, whose GPUs others use, it is one.

    Raises:
        ServiceError: they do not start.
    """
    for logger in ("ray", "ray.serve"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        if not answers(address):  # Ray would try for minutes
            raise ConnectionError(f"Ray at {shown(address)} does not answer; start it, or unset RAY_ADDRESS to use one on this machine")
        cores = num_cores() if address == "local" else None
        ray.init(address, num_cpus=cores, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
        resources = ray.cluster_resources()
        num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        num_replicas = num_replicas or (max(1, num_gpus) if address == "local" else 1)
        on_machine = Counter[str]()  # cores; it may have several nodes
        for node in ray.nodes():
            on_machine[node["NodeManagerAddress"]] += int(node["Resources"].get("CPU", 0)) if node["Alive"] else 0
        num_threads = max(1, min(num_cpus // num_replicas, max(on_machine.values())))
        # Ray would set OpenMP to one core, and a program can change that only for its calling thread.
        environment = {"env_vars": {"OMP_NUM_THREADS": str(num_threads)}}
        deployment = serve.deployment(RayReplica).options(
            num_replicas=num_replicas,
            max_ongoing_requests=limits.REQUESTS,
            health_check_period_s=2,
            graceful_shutdown_timeout_s=limits.DRAIN_SECONDS,
            ray_actor_options={
                "num_cpus": min(1.0, num_cpus / (num_replicas + 1)),
                "num_gpus": 10_000 // -(-num_replicas // num_gpus) / 10_000 if num_gpus else 0,  # equal parts, in Ray's four decimals
                "runtime_env": environment,
            },
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
        index_folder, version = (str(index.folder.absolute()), index.info.version) if index is not None else (None, None)
        versions = (model.identity, model.description.file_sha256, version)
        application = deployment.bind(str(folder.absolute()), index_folder, versions, num_threads, max_batch)
        serve.start(proxy_location="Disabled")
        return RayReplicas(serve.run(application, name=_name_of(ray.get_runtime_context().get_job_id()), route_prefix=None))
    except Exception as error:  # Ray and Serve raise plain exceptions
        line = next((line for line in reversed(str(error).strip().splitlines()) if line.strip()), type(error).__name__)
        raise ServiceError(f"the replicas did not start: {line.strip()}") from error


def stop_replicas(address: str) -> None:
    """End the replicas, and Ray if it was started on this machine."""
    if ray.is_initialized():
        if address != "local":
            with suppress(Exception):
                serve.delete(_name_of(ray.get_runtime_context().get_job_id()))
        ray.shutdown()


def _name_of(job: str) -> str:
    """Return the name of the application of the service that is this job of the cluster: no other service has it."""
    return f"dml-serve-{job}"


def _end_if_the_service_died() -> None:
    """End the application of this replica if its service was killed, or its machine lost: on a cluster Serve would keep it for ever."""
    from ray._private.state import jobs

    with suppress(Exception):  # no answer at the moment
        name = serve.get_replica_context().app_name
        if any(job["IsDead"] and _name_of(job["JobID"]) == name for job in jobs()):
            serve.delete(name, _blocking=False)


def _listen_on_the_node_s_address() -> None:
    """Restrict the port that Serve opens in each replica, for deployments that call each other, to the address of its node of Ray.

    That is 127.0.0.1 for a Ray on this machine and for the local stack. Serve opens the port on every interface, after the replica is
    created, used or not, without a setting for it and without Ray's token. This is private to Ray 2.60: check it when Ray is upgraded; a
    test checks every listening port.
    """
    from ray.serve._private import replica

    add_port, node = replica.add_port_to_grpc_server, ray.util.get_node_ip_address()
    place = f"[{node}]" if ":" in node else node
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", place))
