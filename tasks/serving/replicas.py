"""The replicas of the network on Ray Serve, as the HTTP server sees them. Serve manages their number, routing, and restarts."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.schema import LoggingConfig
from starlette.exceptions import HTTPException

from dml_core.errors import DmlError
from tasks.serving import limits, metrics
from tasks.serving.replica import Answer, Replica

NUM_ATTEMPTS = 5
AGAIN_SECONDS = 0.2
CHECK_SECONDS = 5.0
DRAIN_SECONDS = 5  # for requests in progress when the service ends


class ServiceError(DmlError):
    """The service cannot be started."""


class Replicas:
    """The replicas, called through Serve's handle. A request whose replica dies is sent to another, as requests change nothing."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def answer(self, images: list[bytes], k: int = 0, with_thumbnails: bool = False) -> Answer:
        """Return the embeddings of images or, with k > 0, the k nearest neighbours of each.

        Raises:
            HTTPException: an image cannot be decoded (422), or no replica answers in time (503).
        """
        try:
            async with asyncio.timeout(limits.ANSWER_SECONDS):
                answer = await self._ask(images, k, with_thumbnails)
        except TimeoutError:
            raise HTTPException(503, f"no answer within {limits.ANSWER_SECONDS:g} s; retry later") from None
        if answer.refused is not None:
            raise HTTPException(422, answer.refused)
        metrics.IMAGES.inc(len(images))
        for size in answer.batch_sizes:
            metrics.BATCH_IMAGES.observe(size)
        return answer

    async def check(self) -> bool:
        """Return whether a replica answers."""
        try:
            return bool(await asyncio.wait_for(self._handle.check.remote(), CHECK_SECONDS))
        except (TimeoutError, RayActorError, DeploymentUnavailableError):
            return False

    async def _ask(self, images: list[bytes], k: int, with_thumbnails: bool) -> Answer:
        for _ in range(NUM_ATTEMPTS):
            try:
                answer: Answer = await self._handle.answer.remote(images, k, with_thumbnails)
                return answer
            except RayActorError:
                metrics.RETRIES.inc()
                await asyncio.sleep(AGAIN_SECONDS)
            except (BackPressureError, DeploymentUnavailableError):
                break
        raise HTTPException(503, "no replica is available at the moment; retry later")


def start_replicas(model: Path, index: Path | None, num_replicas: int | None, max_batch: int, address: str, name: str) -> Replicas:
    """Connect to the Ray cluster at `address`, or start Ray if it is "local", and start the replicas on it as the application `name`.

    Raises:
        ServiceError: they do not start.
    """
    for logger in ("ray", "ray.serve"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
        resources = ray.cluster_resources()
        num_gpus, num_cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        num_replicas = num_replicas or max(1, num_gpus)
        num_threads = max(1, num_cores // num_replicas)
        # Ray would set OpenMP to one core, and a program can change that only for its calling thread.
        environment = {"env_vars": {"OMP_NUM_THREADS": str(num_threads)}}
        deployment = serve.deployment(Replica).options(
            num_replicas=num_replicas,
            max_ongoing_requests=limits.REQUESTS,
            health_check_period_s=2,
            graceful_shutdown_timeout_s=DRAIN_SECONDS,
            ray_actor_options={
                "num_cpus": min(1.0, num_cores / (num_replicas + 1)),
                "num_gpus": min(1.0, num_gpus / num_replicas),
                "runtime_env": environment,
            },
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
        index_folder = str(index.absolute()) if index is not None else None
        application = deployment.bind(str(model.absolute()), index_folder, num_threads, max_batch, address == "local")
        serve.start(proxy_location="Disabled")
        return Replicas(serve.run(application, name=name, route_prefix=None))
    except Exception as error:  # Ray and Serve raise plain exceptions
        line = next((line for line in reversed(str(error).strip().splitlines()) if line.strip()), type(error).__name__)
        raise ServiceError(f"the replicas did not start: {line.strip()}") from error
