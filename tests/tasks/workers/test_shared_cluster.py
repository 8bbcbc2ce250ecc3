"""Workers on a cluster of this machine, as in the local stack: who can reach them, and what they do if other work has its CPUs."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import ray_constants

from dml_core.errors import TrainingError
from tasks.runs.specs import ScaleSpec
from tasks.runs.surroundings import SURROUNDINGS, surroundings
from tasks.start_times import StartTimes
from tasks.workers import group
from tasks.workers.board import STOP, Board
from tasks.workers.connection import start_ray, stop_ray
from tasks.workers.group import WorkerGroup
from tests.forked import forked
from tests.loopback_cluster import LOOPBACK, SETTINGS, listening, loopback_cluster
from tests.tasks.workers.conftest import Disturbance, job, threads_of_groups

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


def test_idle_workers_end_only_if_no_job_waits_for_them_and_take_none_afterwards(tmp_path: Path) -> None:
    board, waits = Board.__ray_metadata__.modified_class(), job(tmp_path, tmp_path, "trained")  # type: ignore[attr-defined]
    assert board.submit(waits)
    assert board.close_if_idle() is None
    assert asyncio.run(board.next()) is waits
    assert board.close_if_idle() == STOP
    assert not board.submit(waits)


def test_a_training_listens_on_the_loopback_alone(cluster: psutil.Process, starts: StartTimes, packed: Path, tmp_path: Path) -> None:
    scale = SCALE.model_copy(update={"num_workers": 1})
    workers = WorkerGroup(start_ray(scale), scale, tmp_path / "ray", lambda text: None, starts)
    found: dict[str, set[str]] = {}
    facts = workers.run(job(packed, tmp_path, "trained", num_epochs=1), lambda message: found.update(listening(cluster)))
    workers.close()
    assert threads_of_groups() == []
    assert facts["num_workers"] == 1
    assert facts[SURROUNDINGS] == surroundings("cpu", 2), "a reference's environment is that of the workers"
    assert any("RayTrainWorker" in name and places for name, places in found.items()), found  # an empty list proves nothing
    assert {place for places in found.values() for place in places} <= LOOPBACK, found
    # Ray Train's cleaner would ask the dashboard, which the local stack has not, for ever whether its controller is alive.
    assert not [name for name in found if "PlacementGroupCleaner" in name]


@pytest.mark.proof
def test_a_flow_that_is_killed_leaves_nothing_reserved(cluster: psutil.Process, many_images: Path, tmp_path: Path) -> None:
    start_ray(SCALE)
    assert forked(run_until_killed, many_images, tmp_path) == -signal.SIGKILL
    until = time.monotonic() + 60
    while ray.available_resources().get("CPU") != 2.0:
        assert time.monotonic() < until, ray.util.placement_group_table()
        time.sleep(0.1)
    assert not [name for name in listening(cluster) if "PlacementGroupCleaner" in name]


def run_until_killed(packed: Path, folder: Path) -> None:
    """Train on the cluster until this process is killed in the middle."""
    starts = StartTimes(folder / "starts", lambda text: None)
    workers = WorkerGroup(start_ray(SCALE), SCALE, folder / "ray", lambda text: None, starts)
    workers.run(job(packed, folder, "killed"), Disturbance(lambda: os.kill(os.getpid(), signal.SIGKILL)))


@pytest.mark.proof
def test_a_job_waits_until_the_idle_workers_of_another_flow_have_ended(
    cluster: psutil.Process, starts: StartTimes, many_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives a group one minute to start, here one second. Both would wait for ever if idle workers stayed."""
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1")
    monkeypatch.setattr(group, "IDLE_SECONDS", 15.0)
    said: list[str] = []
    first, second = (WorkerGroup(start_ray(SCALE), SCALE, tmp_path / name, said.append, starts) for name in ("first", "second"))
    assert first.run(job(many_images, tmp_path, "one", 1), lambda message: None)["attempts"] == 1
    assert second.run(job(many_images, tmp_path, "two", 1), lambda message: None)["attempts"] == 1, "a wait is no fault of the job"
    in_use = "the cluster's resources are in use (by this flow's runs or by other work), or a node restarts"
    assert said == [f"d / two / seed 0: {in_use}; waiting for room"]
    monkeypatch.setattr(group, "IDLE_SECONDS", 600.0)
    assert first.run(job(many_images, tmp_path, "three", 1), lambda message: None)["attempts"] == 1, "idle workers are started again"

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(second.run, job(many_images, tmp_path, "four", 1), lambda message: None)
        while len(said) < 3:  # the third job and the fourth
            time.sleep(0.1)
        began = time.monotonic()
        second.close()
        with pytest.raises(TrainingError, match="the flow is ending"):
            waiting.result()
    assert time.monotonic() - began < 10
    first.close()
