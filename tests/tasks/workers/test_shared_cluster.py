"""Workers on a cluster of this machine, as in the local stack: who can reach them."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray._private import ray_constants

from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.workers.connection import start_ray, stop_ray
from tasks.workers.group import WorkerGroup
from tests.loopback_cluster import LOOPBACK, SETTINGS, listening, loopback_cluster
from tests.tasks.workers.conftest import Disturbance, job

pytestmark = pytest.mark.slow
SCALE = ScaleSpec(num_workers=2, device="cpu", max_failures=0)


@pytest.fixture(scope="module")
def cluster(ray_settings: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A cluster of two CPUs, to which this process is connected."""
    with loopback_cluster(2) as (address, process):
        ray_settings.setenv("RAY_ADDRESS", address)
        for name, value in SETTINGS.items():
            ray_settings.setenv(name, value)
        ray_settings.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # as SETTINGS say; Ray may have been imported before
        yield process
        stop_ray()


def test_a_training_listens_on_the_loopback_alone(cluster: psutil.Process, starts: StartTimes, many_images: Path, tmp_path: Path) -> None:
    group = WorkerGroup(start_ray(SCALE), SCALE, tmp_path / "ray", lambda text: None, starts)
    found: dict[str, set[str]] = {}
    facts = group.run(job(many_images, tmp_path, "trained"), Disturbance(lambda: found.update(listening(cluster))))
    group.close()
    assert facts["num_workers"] == 2
    assert any("RayTrainWorker" in name and places for name, places in found.items()), found  # an empty list proves nothing
    assert {place for places in found.values() for place in places} <= LOOPBACK, found
