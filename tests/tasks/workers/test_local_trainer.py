"""A group of one machine starts only the processes that it needs, and Ray Train's controller without torch."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.workers.connection import start_ray, stop_ray
from tasks.workers.group import WorkerGroup
from tests.tasks.workers.conftest import job

SCALE = ScaleSpec(num_workers=2, device="cpu")
UNUSED = ("DatasetManager", "AutoscalingCoordinator", "PlacementGroupCleaner")


@pytest.fixture
def workers(ray_settings: pytest.MonkeyPatch, starts: StartTimes, tmp_path: Path) -> Iterator[WorkerGroup]:
    ray_settings.delenv("RAY_ADDRESS", raising=False)
    group = WorkerGroup(start_ray(SCALE), SCALE, tmp_path / "ray", lambda text: None, starts)
    yield group
    group.close()
    stop_ray()


@pytest.mark.slow
def test_no_process_is_started_that_serves_nothing(workers: WorkerGroup, packed: Path, tmp_path: Path) -> None:
    workers.run(job(packed, tmp_path, "run"), lambda message: None)
    actors = {name for child in psutil.Process().children(recursive=True) if (name := "".join(child.cmdline()[:1])).startswith("ray::")}
    assert any("RayTrainWorker" in name for name in actors)
    assert [name for name in actors if any(part in name for part in UNUSED)] == []


def test_what_the_controller_loads_of_ours_loads_no_torch() -> None:
    code = "import sys, tasks.workers.rendezvous, tasks.workers.group; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
