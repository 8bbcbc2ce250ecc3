"""A cluster whose only node with CPUs restarts while a run trains on it: its runs wait for the node."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import ray_constants

from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.workers import group
from tasks.workers.connection import connect, start_ray, stop_ray
from tasks.workers.group import WorkerGroup
from tests.loopback_cluster import SETTINGS, loopback_cluster
from tests.tasks.workers.conftest import Disturbance, job

pytestmark = [pytest.mark.slow, pytest.mark.proof]
AWAY_SECONDS = 20.0  # twice as long as Ray's and the group's own limits below allow


@contextmanager
def node(head: str) -> Iterator[psutil.Process]:
    """A node of the cluster with two CPUs."""
    with loopback_cluster(2, head) as (_, process):
        yield process


def test_runs_wait_for_a_node_that_restarts(
    ray_settings: pytest.MonkeyPatch, starts: StartTimes, many_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "2")
    monkeypatch.setattr(group, "FREE_SECONDS", 1.0)
    scale = ScaleSpec(num_workers=2, device="cpu")
    said: list[str] = []
    with loopback_cluster(0) as (address, _):
        ray_settings.setenv("RAY_ADDRESS", address)
        for name, value in SETTINGS.items():
            ray_settings.setenv(name, value)
        ray_settings.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        back = threading.Event()
        with node(address) as first:
            connect()
            while not ray.cluster_resources().get("CPU"):
                time.sleep(0.1)
            workers = WorkerGroup(start_ray(scale), scale, tmp_path / "ray", said.append, starts)
            lost = Disturbance(lambda: (*[child.kill() for child in first.children(recursive=True)], first.kill()))  # type: ignore[arg-type]

            def restart() -> None:
                while lost.at is None or ray.cluster_resources().get("CPU"):  # Ray sees the loss after half a minute
                    time.sleep(0.1)
                time.sleep(AWAY_SECONDS)
                with node(address):
                    back.wait(600)

            restarting = threading.Thread(target=restart)
            restarting.start()
            try:
                facts = workers.run(job(many_images, tmp_path, "restarted", scale=scale), lost)
            finally:
                workers.close()
                back.set()
                restarting.join()
                stop_ray()
    assert facts["num_workers"] == 2
    assert [line for line in said if "waiting for room" in line], said
