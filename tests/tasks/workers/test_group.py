"""Worker groups on a real Ray: their processes and end; disturbed runs end as if undisturbed, or with one line in a given time."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import WorkerGroupError

from dml_core.errors import DataError, TrainingError
from dml_core.training.checkpoints.file import load_checkpoint
from dml_core.training.history import Progress
from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.workers import connection, group
from tasks.workers.connection import start_ray, stop_ray
from tasks.workers.group import WorkerGroup
from tasks.workers.jobs import LostWorkersError, class_of_end
from tasks.workers.placement import choose
from tests.tasks.workers.conftest import EPOCHS, STEPS, Disturbance, job, processes, threads_of_groups

pytestmark = pytest.mark.slow
HANG_MINUTES = 0.15
SOON = 180.0  # seconds; 37 to 63 were observed: it only shows that nothing waits for ever
SCALE = ScaleSpec(num_workers=2, device="cpu", max_failures=1, hang_minutes=HANG_MINUTES, checkpoint_every_steps=7, deterministic=True)
UNUSED = ("DatasetManager", "AutoscalingCoordinator", "PlacementGroupCleaner", "dashboard/dashboard.py", "monitor.py")
AGENT_PORT = 52365  # of each Ray, unless told otherwise


@pytest.fixture(scope="module")
def another_ray() -> Iterator[None]:
    """Hold the port that another Ray of the machine would have."""
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # there is another Ray
            taken.bind(("127.0.0.1", AGENT_PORT))
            taken.listen()
        yield


@pytest.fixture(scope="module")
def workers(
    another_ray: None, ray_settings: pytest.MonkeyPatch, starts: StartTimes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerGroup]:
    """Two workers on a Ray of this machine, which is told of a GPU, shared by this module's tests as by a flow's runs."""
    ray_settings.delenv("RAY_ADDRESS", raising=False)
    ray_settings.setattr(connection, "num_gpus", lambda: 1)
    placement = start_ray(SCALE)
    made = WorkerGroup(placement, SCALE, tmp_path_factory.mktemp("ray"), lambda text: None, starts)
    yield made
    made.close()
    stop_ray()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(workers: WorkerGroup, many_images: Path, state: Path) -> dict[str, object]:
    facts = workers.run(job(many_images, state, "undisturbed", scale=ScaleSpec(deterministic=True)), lambda message: None)
    assert facts["attempts"] == 1
    assert facts["deterministic"], "torch's setting was on in the workers"
    return left(state, "undisturbed")


def left(state: Path, name: str) -> dict[str, object]:
    """Return everything that a run has left, except its name."""
    checkpoint = load_checkpoint(state / "store/train" / name, name)
    assert checkpoint is not None
    history = (state / "store/train" / name / "history.jsonl").read_text()
    assert history.count("\n") == EPOCHS * STEPS
    return {name: value for name, value in checkpoint.items() if name != "identity"} | {"file": history}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def signal_to(part: str, number: signal.Signals, which: int = -1) -> Callable[[], None]:
    return lambda: processes(part)[which].send_signal(number)


def stop_a_loader() -> None:
    """Stop a process that loads images: its worker waits for ever, but still answers Ray."""
    workers = processes("RayTrainWorker")
    loaders = [process for process in workers if process.ppid() in {worker.pid for worker in workers}]
    loaders[0].send_signal(signal.SIGSTOP)


def test_what_the_controller_loads_of_ours_loads_no_torch() -> None:
    code = "import sys, tasks.workers.rendezvous, tasks.workers.group; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_machine_with_one_gpu_gives_a_run_of_two_workers_its_gpu_or_seven_runs_a_part(workers: WorkerGroup) -> None:
    resources = ray.cluster_resources()
    chosen = choose(ScaleSpec(num_workers=2), [resources])
    assert (chosen.device, chosen.num_workers) == ("cuda", 1)
    scale = ScaleSpec(concurrent_runs=7, runs_per_gpu=7, num_loader_workers=0)
    share = choose(scale, [{"CPU": 7.0, "GPU": resources["GPU"]}]).resources["GPU"]
    parts = [ray.util.placement_group([{"GPU": share}]) for _ in range(7)]  # as Ray Train reserves each worker's part
    ray.get([part.ready() for part in parts], timeout=60)
    for part in parts:
        ray.util.remove_placement_group(part)


@pytest.mark.parametrize(
    ("name", "deed"),
    [
        ("killed", signal_to("RayTrainWorker", signal.SIGKILL)),
        pytest.param("terminated", signal_to("RayTrainWorker", signal.SIGTERM), marks=pytest.mark.proof),
        pytest.param("stopped", signal_to("RayTrainWorker", signal.SIGSTOP), marks=pytest.mark.proof),
        pytest.param("waiting", stop_a_loader, marks=pytest.mark.proof),
        pytest.param("boardless", signal_to("ray::Board", signal.SIGKILL), marks=pytest.mark.proof),
        pytest.param("headless", signal_to("ray::TrainController", signal.SIGKILL), marks=pytest.mark.proof),
    ],
)
def test_a_disturbed_run_ends_in_the_weights_of_one_that_was_not(
    workers: WorkerGroup,
    many_images: Path,
    state: Path,
    undisturbed: dict[str, object],
    name: str,
    deed: Callable[[], None],
) -> None:
    disturbance, began = Disturbance(deed), time.monotonic()
    workers._placement = replace(workers._placement, num_loaders=int(deed is stop_a_loader))
    facts = workers.run(job(many_images, state, name, scale=SCALE), disturbance)
    assert disturbance.at is not None, "the run was over before it was disturbed"
    assert facts["attempts"] == 2
    assert facts["taken_up"] or name == "boardless"  # a board may die before a checkpoint is saved
    assert same(left(state, name), undisturbed)
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize(
    ("fault", "reported", "is_outside"),
    [
        ("Ray's workers ended: x", None, True),
        ("the process that hands out jobs died", RuntimeError("x"), True),
        ("OSError: full", LostWorkersError("OSError: full"), True),
        ("ValueError: the margin is too large", TrainingError("ValueError"), False),
        ("OutOfMemoryError: CUDA out of memory", LostWorkersError("x"), False),
        ("RuntimeError: worker 1: OutOfMemoryError: CUDA", None, False),
        ("Ray's workers ended: OutOfMemoryError: Task was killed", None, False),
        ("OSError: Cannot allocate memory", LostWorkersError("x"), False),
    ],
)
def test_lost_workers_are_no_fault_of_the_settings_but_full_memory_and_exceptions_of_their_own_are(
    fault: str,
    reported: Exception | None,
    is_outside: bool,
    starts: StartTimes,
    many_images: Path,
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By it a search tells whether it goes on without these settings."""
    lost = WorkerGroup(choose(SCALE, [{"CPU": 2.0}]), SCALE, tmp_path, lambda text: None, starts)

    def ends(*given: object) -> None:
        raise group._GroupEndedError(fault) from reported

    monkeypatch.setattr(lost, "_attempt", ends)
    with pytest.raises(TrainingError, match=f"given up after 2 attempts; the last: {fault}") as raised:
        lost.run(job(many_images, state, "lost"), lambda message: None)
    assert type(raised.value) is (LostWorkersError if is_outside else TrainingError)


def test_workers_that_ray_ended_for_their_memory_are_told_from_others_that_died() -> None:
    """Ray Train wraps the reason, and a line says only that a health check failed."""

    def why(reason: Exception) -> str:
        failed = WorkerHealthCheckFailedError("A worker health check failed.\nWorker info: x", failure=reason)
        return group._why(WorkerGroupError("failed", {0: failed}))

    said = why(ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.\nmore"))
    assert said == "OutOfMemoryError: Task was killed due to the node running low on memory"
    assert class_of_end(group._GroupEndedError(said)) is TrainingError
    died = why(ray.exceptions.RayActorError())
    assert died.startswith("RayActorError: ")
    assert class_of_end(group._GroupEndedError(died)) is LostWorkersError


@pytest.mark.proof
def test_a_board_that_dies_each_time_ends_the_job_in_one_line(workers: WorkerGroup, many_images: Path, state: Path) -> None:
    began = time.monotonic()
    deaths: list[int] = []

    def kill_each(message: object) -> None:
        for process in processes("ray::Board"):
            if process.pid not in deaths:
                deaths.append(process.pid)
                process.kill()

    with pytest.raises(TrainingError, match=r"^d / dies.*given up after 2 attempts; the last: the process that hands out jobs .* died"):
        workers.run(job(many_images, state, "dies"), kill_each)
    assert len(deaths) == 2
    assert time.monotonic() - began < SOON


@pytest.mark.proof
def test_workers_that_fail_before_they_take_a_job_end_it_in_one_line(
    workers: WorkerGroup, many_images: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_be_imported(config: object) -> None:
        raise ImportError("libsomething.so: cannot open shared object file")

    workers._end()
    monkeypatch.setattr(group, "_serve", cannot_be_imported)
    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"given up after 2 attempts; the last: .*libsomething\.so: cannot open") as raised:
        workers.run(job(many_images, state, "unimportable"), lambda message: None)
    assert "\n" not in str(raised.value)
    assert time.monotonic() - began < SOON


@pytest.mark.proof
def test_resources_that_are_never_there_end_the_job_in_one_line(
    workers: WorkerGroup, starts: StartTimes, many_images: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives a group one minute to start, here three seconds."""
    workers._end()
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "3")
    scale = SCALE.model_copy(update={"num_workers": (100, 100)})
    impossible = WorkerGroup(group.choose(scale, [{"CPU": 2.0}]), scale, tmp_path, lambda text: None, starts)
    monkeypatch.setattr(group, "FREE_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"given up after 2 attempts; the last: .*100") as raised:
        impossible.run(job(many_images, state, "impossible"), lambda message: None)
    assert "\n" not in str(raised.value)
    impossible.close()
    assert time.monotonic() - began < SOON


@pytest.mark.proof
def test_a_mistake_of_the_run_s_is_told_at_once_and_the_next_run_goes_on(workers: WorkerGroup, many_images: Path, state: Path) -> None:
    with pytest.raises(DataError, match="no-such-folder"):
        workers.run(job(many_images.parent / "no-such-folder", state, "mistaken"), lambda message: None)
    facts = workers.run(job(many_images, state, "undisturbed"), lambda message: None)  # already done: nothing is trained
    assert (facts["attempts"], facts["num_workers"], facts["num_sharing"]) == (1, 2, workers._placement.num_groups)


@pytest.mark.proof
def test_sigterm_leaves_a_checkpoint_of_the_step_that_it_came_in(workers: WorkerGroup, many_images: Path, state: Path) -> None:
    """Without checkpoints by steps or minutes, the run resumes from the checkpoint written at SIGTERM."""
    resumed: list[tuple[int, int]] = []
    disturbance = Disturbance(signal_to("RayTrainWorker", signal.SIGTERM))

    def watch(message: Progress) -> None:
        disturbance(message)
        if disturbance.at is not None and message is not disturbance.at and not message.epoch_ended:
            resumed.append((message.epoch, message.step))

    facts = workers.run(job(many_images, state, "in the middle"), watch)
    assert disturbance.at is not None
    assert facts["attempts"] == 2
    assert resumed[0] >= (disturbance.at.epoch, disturbance.at.step)


def test_a_group_starts_no_process_that_serves_nothing_and_a_closed_one_has_no_thread_that_waits_for_ray(
    workers: WorkerGroup, many_images: Path, undisturbed: object, tmp_path: Path, starts: StartTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread would crash the process when Ray disconnects. One group is busy, the other is starting, on a busy machine.

    test_shared_cluster.py closes an idle one.
    """
    workers.start()
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert any("RayTrainWorker" in command for command in commands)
    assert [command for command in commands if any(part in command for part in UNUSED)] == []
    (raylet,) = [command for command in commands if "raylet/raylet" in command]
    ports = re.findall(r"--(?:metrics-agent-port|metrics_export_port|runtime_env_agent_port|dashboard_agent_listen_port)=([0-9]+)", raylet)
    assert len({*ports}) == 4
    assert "0" not in ports, "on a busy machine the raylet would end before it was told"
    log = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1] / "logs/dashboard_agent.log"
    assert "Failed to bind" not in log.read_text(), "Ray's start waited for another Ray's port"
    training, ended = threading.Event(), []

    def run() -> None:
        with pytest.raises(TrainingError, match=r"the flow is ending|Ray's workers ended") as error:
            workers.run(job(many_images, tmp_path, "busy", 50), lambda message: training.set())
        ended.append(error)

    caller = threading.Thread(target=run)
    caller.start()
    assert training.wait(60)
    workers.close()
    assert threads_of_groups() == []
    caller.join(5)
    assert len(ended) == 1

    alone = ScaleSpec(num_workers=1, device="cpu")
    starting = WorkerGroup(start_ray(alone), alone, tmp_path / "ray", lambda text: None, starts)
    for limit in ("CLOSE_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(group, limit, 0.5)  # as if the start took a hundred times as long
    starting.start()
    starting.close()
    assert threads_of_groups() == []
