"""Ray and a group of one machine start only the processes that they need, and Ray Train's controller without torch."""

import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray

from dml_core.errors import TrainingError
from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.workers import group
from tasks.workers.connection import start_ray, stop_ray
from tasks.workers.group import WorkerGroup
from tests.tasks.workers.conftest import job

SCALE = ScaleSpec(num_workers=2, device="cpu")
UNUSED = ("DatasetManager", "AutoscalingCoordinator", "PlacementGroupCleaner", "dashboard/dashboard.py", "monitor.py")
AGENT_PORT = 52365  # of each Ray, unless told otherwise


@pytest.fixture
def another_ray() -> Iterator[None]:
    """Hold the port that another Ray of the machine would have."""
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # there is another Ray
            taken.bind(("127.0.0.1", AGENT_PORT))
            taken.listen()
        yield


@pytest.fixture
def workers(another_ray: None, ray_settings: pytest.MonkeyPatch, starts: StartTimes, tmp_path: Path) -> Iterator[WorkerGroup]:
    ray_settings.delenv("RAY_ADDRESS", raising=False)
    group = WorkerGroup(start_ray(SCALE), SCALE, tmp_path / "ray", lambda text: None, starts)
    yield group
    group.close()
    stop_ray()


@pytest.mark.slow
def test_a_group_starts_no_process_that_serves_nothing_and_a_closed_one_has_no_thread_that_waits_for_ray(
    workers: WorkerGroup, many_images: Path, tmp_path: Path, starts: StartTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread would crash the process when Ray disconnects. The groups are idle, busy and starting, the last on a busy machine."""
    facts = workers.run(replace(job(many_images, tmp_path, "idle", 1), scale=ScaleSpec(deterministic=True)), lambda message: None)
    assert facts["deterministic"], "torch's setting was on in the workers"
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert any("RayTrainWorker" in command for command in commands)
    assert [command for command in commands if any(part in command for part in UNUSED)] == []
    (raylet,) = [command for command in commands if "raylet/raylet" in command]
    ports = re.findall(r"--(?:metrics-agent-port|metrics_export_port|runtime_env_agent_port|dashboard_agent_listen_port)=([0-9]+)", raylet)
    assert len({*ports}) == 4
    assert "0" not in ports, "on a busy machine the raylet would end before it was told"
    log = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1] / "logs/dashboard_agent.log"
    assert "Failed to bind" not in log.read_text(), "Ray's start waited for another Ray's port"
    workers.close()
    assert threads_of_groups() == []

    busy = WorkerGroup(start_ray(SCALE), SCALE, tmp_path / "ray", lambda text: None, starts)
    training, ended = threading.Event(), []

    def run() -> None:
        with pytest.raises(TrainingError, match=r"the flow is ending|Ray's workers ended") as error:
            busy.run(job(many_images, tmp_path, "busy", 50), lambda message: training.set())
        ended.append(error)

    caller = threading.Thread(target=run)
    caller.start()
    assert training.wait(60)
    busy.close()
    assert threads_of_groups() == []
    caller.join(5)
    assert len(ended) == 1

    starting = WorkerGroup(start_ray(SCALE), SCALE, tmp_path / "ray", lambda text: None, starts)
    for limit in ("CLOSE_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(group, limit, 0.5)  # as if the start took a hundred times as long
    starting.start()
    starting.close()
    assert threads_of_groups() == []


def threads_of_groups() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("worker-group", "workers-timed")]


def test_what_the_controller_loads_of_ours_loads_no_torch() -> None:
    code = "import sys, tasks.workers.rendezvous, tasks.workers.group; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
