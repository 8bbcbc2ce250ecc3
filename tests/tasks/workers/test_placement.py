"""Placement of a flow's runs on every kind of machine: devices are used, and no missing resource is requested."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import state

from dml_core.errors import TrainingError
from dml_core.training.history import Progress
from tasks.plans.times import placement_here
from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.workers import connection, group, placement
from tasks.workers.jobs import InfrastructureError
from tasks.workers.placement import choose


@pytest.mark.parametrize(
    ("scale", "resources", "device", "num_workers", "num_groups"),
    [
        ({"num_workers": 2}, {"CPU": 2}, "cpu", 2, 1),
        ({"num_workers": 2}, {"CPU": 16, "GPU": 1}, "cuda", 1, 1),
        ({"num_workers": 2, "concurrent_runs": 2}, {"CPU": 16, "GPU": 1}, "cuda", 1, 1),
        ({"num_workers": 2, "concurrent_runs": 2}, {"CPU": 16, "GPU": 3}, "cuda", 1, 2),
        ({"num_workers": 2, "concurrent_runs": 2}, {"CPU": 1, "GPU": 8}, "cuda", 2, 2),
        ({"num_workers": 4, "device": "cuda"}, {"CPU": 16, "GPU": 1}, "cuda", 1, 1),
        ({"num_workers": 4, "device": "cpu"}, {"CPU": 2, "GPU": 8}, "cpu", 2, 1),
        ({"num_workers": 4, "concurrent_runs": 3}, {"CPU": 2}, "cpu", 1, 2),
        ({"num_workers": (1, 4)}, {"CPU": 3}, "cpu", 3, 1),
        ({"num_workers": (2, 4), "concurrent_runs": 3}, {"CPU": 5}, "cpu", 2, 2),
        ({"num_workers": (2, 4), "concurrent_runs": 3}, {"CPU": 16, "GPU": 3}, "cuda", 3, 1),
    ],
)
def test_runs_are_fitted_to_what_there_is(
    scale: dict[str, object], resources: dict[str, float], device: str, num_workers: int, num_groups: int
) -> None:
    chosen = choose(ScaleSpec(**scale), [resources])
    assert (chosen.device, chosen.num_workers, chosen.num_groups) == (device, num_workers, num_groups)
    assert chosen.num_workers * chosen.num_groups <= resources["GPU" if device == "cuda" else "CPU"]


@pytest.mark.parametrize(
    ("scale", "resources", "num_runs", "num_workers", "num_groups"),
    [
        ({"num_workers": 2, "concurrent_runs": 8}, {"CPU": 2}, 1, 2, 1),  # one run has both cores
        ({"num_workers": 2, "concurrent_runs": 8}, {"CPU": 2}, 2, 1, 2),
        ({"num_workers": 8, "concurrent_runs": 8}, {"CPU": 64, "GPU": 8}, 1, 8, 1),
        ({"num_workers": 8, "concurrent_runs": 8}, {"CPU": 64, "GPU": 8}, 3, 2, 3),
        ({"num_workers": 8, "concurrent_runs": 8}, {"CPU": 64, "GPU": 8}, 100, 1, 8),
        ({"num_workers": 2, "concurrent_runs": 8}, {"CPU": 64, "GPU": 8}, 1, 2, 4),  # embeddings of the other runs use the rest
        ({"num_workers": 1, "concurrent_runs": 8}, {"CPU": 2}, 1, 1, 2),
        ({"num_workers": (1, 8), "concurrent_runs": 8}, {"CPU": 4}, 1, 4, 1),
        ({"num_workers": 2, "concurrent_runs": 8}, {"CPU": 2}, 0, 2, 1),
    ],
)
def test_few_runs_get_more_workers_each(
    scale: dict[str, object], resources: dict[str, float], num_runs: int, num_workers: int, num_groups: int
) -> None:
    chosen = choose(ScaleSpec(**scale), [resources], num_runs=num_runs)
    assert (chosen.num_workers, chosen.num_groups) == (num_workers, num_groups)


@pytest.mark.parametrize(
    ("scale", "nodes", "num_loaders", "num_cores"),
    [
        ({}, [{"CPU": 2}], 0, 1),
        ({"num_loader_workers": 3}, [{"CPU": 2}], 3, 2),  # an explicit number of loaders is kept, with the available cores
        ({}, [{"CPU": 16, "GPU": 1}], 15, 16),
        ({}, [{"CPU": 64, "GPU": 1}], 16, 17),
        ({"num_workers": 4}, [{"CPU": 16, "GPU": 4}], 3, 4),
        ({"num_workers": 2, "concurrent_runs": 2}, [{"CPU": 16, "GPU": 8}], 1, 2),  # the other GPUs keep their cores
        ({"num_workers": 2, "num_loader_workers": 7}, [{"CPU": 16, "GPU": 8}], 7, 8),
        ({}, [{"CPU": 1, "GPU": 1}], 0, 1),
        ({"num_workers": 2}, [{"CPU": 1, "GPU": 2}], 0, 0),  # Ray would place no worker that requests a core
        ({}, [{"CPU": 64}, {"CPU": 4, "GPU": 1}], 3, 4),  # cores of a machine without a GPU cannot be used
        ({"num_workers": 3}, [{"CPU": 9, "GPU": 2}, {"CPU": 4, "GPU": 1}], 3, 4),
    ],
)
def test_loaders_are_as_many_as_every_worker_has_cores_for(
    scale: dict[str, object], nodes: list[dict[str, float]], num_loaders: int, num_cores: int
) -> None:
    chosen = choose(ScaleSpec(**scale), nodes)
    assert (chosen.num_loaders, chosen.num_cores) == (num_loaders, num_cores)
    assert chosen.resources == {"CPU": num_cores} | ({"GPU": 1} if any("GPU" in node for node in nodes) else {})


@pytest.mark.parametrize(
    ("concurrent_runs", "runs_per_gpu", "num_gpus", "num_groups", "num_loaders", "text"),
    [
        (12, 12, 1, 12, 0, "training on 1 GPU: 1 worker a run, 12 runs at a time"),
        (8, 4, 2, 8, 1, "training on 2 GPUs: 1 worker a run, 1 loader each, 8 runs at a time"),
        (3, 4, 1, 3, 3, "training on 1 GPU: 1 worker a run, 3 loaders each, 3 runs at a time"),
        (64, 7, 2, 14, 0, "training on 2 GPUs: 1 worker a run, 14 runs at a time (64 allowed)"),
        (5, 4, 2, 5, 1, "training on 2 GPUs: 1 worker a run, 1 loader each, 5 runs at a time"),
    ],
)
def test_runs_share_a_gpu(concurrent_runs: int, runs_per_gpu: int, num_gpus: int, num_groups: int, num_loaders: int, text: str) -> None:
    scale = ScaleSpec(concurrent_runs=concurrent_runs, runs_per_gpu=runs_per_gpu)
    chosen = choose(scale, [{"CPU": 16.0, "GPU": float(num_gpus)}])
    assert (chosen.device, chosen.num_workers, chosen.num_groups, chosen.num_loaders, chosen.describe(scale)) == (
        "cuda",
        1,
        num_groups,
        num_loaders,
        text,
    )
    assert 0 < chosen.resources["GPU"] * runs_per_gpu <= 1, "Ray places all runs of a GPU"
    assert chosen.resources["GPU"] == pytest.approx(1 / runs_per_gpu, abs=1e-4)


@pytest.mark.parametrize(
    ("runs_per_gpu", "free", "num_places"),
    [(8, 0.875, 7), (8, 1.125, 9), (8, 0.1, 0), (7, 2.1432, 15), (10, 0.7, 7), (1, 0.9, 0), (1, 2.0, 2), (64, 16.0, 1024)],
)
def test_a_part_of_a_gpu_is_room_for_some_runs(runs_per_gpu: int, free: float, num_places: int) -> None:
    placement = choose(ScaleSpec(runs_per_gpu=runs_per_gpu, num_loader_workers=0), [{"CPU": 2.0, "GPU": 1.0}])
    assert replace(placement, num_cores=0).num_places([{"CPU": 2.0, "GPU": free}]) == num_places


def test_a_machine_without_gpus_ignores_how_many_runs_share_one() -> None:
    chosen = choose(ScaleSpec(concurrent_runs=8, runs_per_gpu=8), [{"CPU": 2.0}])
    assert (chosen.device, chosen.num_groups, chosen.resources) == ("cpu", 2, {"CPU": 1})


def test_fewer_than_the_fewest_are_waited_for() -> None:
    assert choose(ScaleSpec(num_workers=(3, 4), concurrent_runs=2), [{"CPU": 2.0}]).num_workers == 3


def test_the_choice_is_said_in_one_line() -> None:
    scale = ScaleSpec(num_workers=2)
    assert choose(scale, [{"CPU": 2.0}]).describe(scale) == "training on 2 CPUs: 2 workers a run"
    on_a_gpu = choose(scale, [{"CPU": 16.0, "GPU": 1.0, "accelerator_type:H100": 1.0}])
    assert on_a_gpu.describe(scale) == "training on 1 GPU (H100): 1 worker a run (2 allowed), 15 loaders each"
    scale = ScaleSpec(num_workers=2, concurrent_runs=4, num_loader_workers=0)
    beside = choose(scale, [{"CPU": 16.0, "GPU": 2.0}])
    assert beside.describe(scale) == "training on 2 GPUs: 1 worker a run (2 allowed), 2 runs at a time (4 allowed)"


@pytest.mark.parametrize(
    ("scale", "num_runs", "says"),
    [
        ({"concurrent_runs": 8}, 40, ", 8 runs at a time; this flow leaves 8 GPUs unused: raise scale.concurrent_runs"),
        ({}, 2, "training on 1 GPU: 1 worker a run, 15 loaders each; this flow leaves 15 GPUs unused: raise scale.concurrent_runs"),
        ({"concurrent_runs": 8, "runs_per_gpu": 4}, 40, "; this flow leaves 14 GPUs unused: raise scale.concurrent_runs"),
        ({"concurrent_runs": 15, "num_workers": (2, 2)}, 40, ", 8 runs at a time (15 allowed)"),
        ({"concurrent_runs": 8}, 8, ", 8 runs at a time"),  # no run waits
        ({"concurrent_runs": 8}, None, ", 8 runs at a time"),  # as in an estimate
        ({"concurrent_runs": 8, "num_workers": 2}, 40, "training on 16 GPUs: 2 workers a run, 15 loaders each, 8 runs at a time"),
        ({"concurrent_runs": 16}, 40, ", 16 runs at a time"),
        ({"concurrent_runs": 8, "device": "cpu"}, 40, ", 8 runs at a time"),  # a run's threads use the other cores
    ],
)
def test_gpus_that_waiting_runs_could_use_are_named(scale: dict[str, Any], num_runs: int | None, says: str) -> None:
    spec, two_nodes = ScaleSpec(**scale), [{"CPU": 128.0, "GPU": 8.0}] * 2
    text = choose(spec, two_nodes, num_runs).describe(spec)
    assert text.endswith(says)
    assert ("unused" in text) == ("unused" in says)


def test_only_what_was_asked_for_by_name_is_refused() -> None:
    with pytest.raises(InfrastructureError, match="device is cuda and Ray has no GPU"):
        choose(ScaleSpec(device="cuda"), [{"CPU": 16.0}])
    with pytest.raises(InfrastructureError, match="no CPU"):
        choose(ScaleSpec(), [{}])


@pytest.mark.parametrize(
    ("files", "usable", "visible", "expected"),
    [
        ((), True, 0, 0),
        (("nvidia0", "nvidia1", "nvidiactl"), True, 2, 2),
        (("nvidia0", "nvidia1"), True, 1, 1),  # CUDA_VISIBLE_DEVICES=1
        (("nvidia0", "nvidia1"), False, 2, 0),  # a driver that is too old for torch
        (("dxg",), True, 1, 1),  # Windows' subsystem for Linux
    ],
)
def test_only_gpus_that_torch_can_use_count(
    files: tuple[str, ...], usable: bool, visible: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In plans, and in a Ray that is started here: it would place workers on others, and each would end at its first use of CUDA."""
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(placement, "DEVICES", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: usable)
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    planned = placement_here(ScaleSpec(concurrent_runs=8))
    assert (planned.device == "cuda") == (expected > 0)
    assert not expected or planned.num_groups == expected
    started: list[int] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda *_, num_gpus, **__: started.append(num_gpus))
    monkeypatch.setattr(connection, "watch_children", lambda names: lambda: None)
    monkeypatch.setattr(connection.atexit, "register", lambda function: None)
    connection.connect()
    connection.stop_ray()
    assert started == [expected]


def test_the_ports_of_ray_s_agents_are_given_to_nobody_else_before_they_start_and_are_free_afterwards() -> None:
    from ray._private import parameter

    with connection._needed_processes():
        params = parameter.RayParams()
        ports = {params.dashboard_agent_listen_port, params.metrics_agent_port, params.metrics_export_port, params.runtime_env_agent_port}
    assert len(ports) == 4
    given = set()
    for _ in range(100_000):  # of some 7,000 to 28,000 that there are
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            given.add(other.getsockname()[1])
    assert len(given) > 5_000
    assert given & ports == set()
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()  # an agent can have its own
    connection.stop_ray()
    for port in ports:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))


def test_a_start_that_fails_leaves_no_process_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts its GCS first, and leaves it if its raylet does not answer; the next start has its own."""
    started: list[subprocess.Popen[bytes]] = []

    def fails(*_: object, **__: object) -> None:
        assert all(process.poll() is not None for process in started), "the first attempt's"
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "gcs of this test"]))
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", fails)
    monkeypatch.setattr(connection, "RAY_PROCESSES", {"gcs of this test": "Ray's GCS"})  # other tests may have a Ray
    try:
        with pytest.raises(InfrastructureError, match="Ray on this machine did not start or does not answer: The current node"):
            connection.connect()
        assert [process.poll() is not None for process in started] == [True, True]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize("is_back", [False, True])
def test_a_cluster_that_is_down_is_waited_for_and_reported(is_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself takes 205 s to give up, in each of two attempts, and each run of a flow would try."""
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda address, **_: seen.append(address))
    monkeypatch.setattr(connection, "WAIT_SECONDS", 60.0 if is_back else 0.0)
    if not is_back:
        with pytest.raises(InfrastructureError, match=f"^Ray at {address} does not answer; start it"):
            connection.connect()
        assert seen == []
        return

    answers = iter([False, True])
    monkeypatch.setattr(connection, "answers", lambda address: next(answers))
    connection.connect()
    assert seen == [address]


LARGE, SMALL = {"CPU": 17.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}
TAKEN = {"CPU": 0.0, "GPU": 0.0}


@pytest.mark.parametrize(
    ("num_workers", "joining", "free", "asked", "size", "num_cores"),
    [
        (4, SMALL, SMALL, True, 2, 4),  # the workers that reserved 17 cores reserve 4, so that a place is there for both
        (4, SMALL, {"CPU": 1.0, "GPU": 1.0}, False, 1, 4),  # its cores are another flow's
        (4, {"CPU": 64.0}, {"CPU": 64.0}, False, 1, 17),  # no GPU, and the run has begun on one
        (1, SMALL, SMALL, False, 1, 4),
    ],
)
def test_an_elastic_run_grows_only_where_its_workers_fit(
    num_workers: int,
    joining: dict[str, float],
    free: dict[str, float],
    asked: bool,
    size: int,
    num_cores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine with fewer cores joins: Ray would wait for a place that no machine has, until the run is given up."""
    scale = ScaleSpec(num_workers=(1, num_workers))
    monkeypatch.setattr(state, "state", SimpleNamespace(get_draining_nodes=dict, disconnect=lambda: None))
    monkeypatch.setattr(state, "total_resources_per_node", lambda: {"first": LARGE, "second": joining})
    monkeypatch.setattr(state, "available_resources_per_node", lambda: {"first": TAKEN, "second": free})
    monkeypatch.setattr(group, "FREE_SECONDS", 0.0)
    workers = group.WorkerGroup(choose(scale, [LARGE]), scale, tmp_path, lambda line: None, StartTimes(tmp_path, lambda line: None))
    workers._num_workers, calls = 1, []
    monkeypatch.setattr(workers, "_ask", calls.append)
    job: Any = SimpleNamespace(spec=SimpleNamespace(title="run"))
    workers._make_way_if_there_is_room(job)
    assert calls == ["make_way"] * asked
    monkeypatch.setattr(state, "available_resources_per_node", lambda: {"first": LARGE, "second": free})  # the group has ended
    assert workers._fitting_size() == size
    assert workers._placement.num_cores == num_cores


def test_a_cluster_that_has_lost_a_node_stays_large_enough_for_half_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale, now, nodes = ScaleSpec(num_workers=2), [5.0], {"first": {"CPU": 2.0}}
    monkeypatch.setattr(state, "state", SimpleNamespace(get_draining_nodes=dict, disconnect=lambda: None))
    monkeypatch.setattr(state, "total_resources_per_node", lambda: nodes)
    monkeypatch.setattr(group.time, "monotonic", lambda: now[0])
    workers = group.WorkerGroup(choose(scale, [{"CPU": 2.0}]), scale, tmp_path, lambda line: None, StartTimes(tmp_path, lambda line: None))
    workers._num_workers = 3
    assert not workers._is_large_enough(), "it never was"
    workers._num_workers = 2
    assert workers._is_large_enough()
    nodes.clear()
    now[0] += 1799
    assert workers._is_large_enough()
    now[0] += 2
    assert not workers._is_large_enough()
    workers._scale = ScaleSpec(num_workers=(1, 2))
    now[0] -= 1800
    assert not workers._is_large_enough(), "an elastic run goes on with what is there"


HOUR = 60.0


@pytest.mark.parametrize(
    ("attempts", "num_attempts"),
    [
        ([[(1.0, epoch, 50), (HOUR, epoch, 60), (HOUR, epoch + 1, 50)] for epoch in range(6)], 7),  # nodes that are lost every two hours
        ([[(HOUR, 0, 99), (HOUR, 1, 50 + number)] for number in range(6)], None),  # the same place, but for the time of the last message
        ([[(1.0, 0, 50 * number), (5.0, 0, 50 * number + 40)] for number in range(6)], None),  # a little later each time
        ([[(1.0, 0, 50 + number), (HOUR, 0, 0)] for number in range(6)], None),  # a hang, noticed after an hour
        ([[] for _ in range(6)], None),  # workers that do not start, or embed
    ],
)
def test_a_long_training_may_lose_nodes_now_and_then_but_a_fault_that_recurs_ends_it(
    attempts: list[list[tuple[float, int, int]]], num_attempts: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt has messages: minutes since the one before, epoch and step."""
    now, left = [5.0], list(attempts)
    monkeypatch.setattr(group.time, "monotonic", lambda: now[0])
    scale = ScaleSpec(max_failures=2)
    workers = group.WorkerGroup(choose(scale, [{"CPU": 2.0}]), scale, tmp_path, lambda line: None, StartTimes(tmp_path, lambda line: None))

    def attempt(job: object, watch: Callable[[Progress], None], spent: object) -> dict[str, object]:
        if not left:
            return {}
        for minutes, epoch, step in left.pop(0):
            now[0] += 60 * minutes
            if step:
                watch(Progress(epoch, 9, step, 100, 1.0, {}))
        raise group._GroupEndedError("the node is lost")

    monkeypatch.setattr(workers, "_attempt", attempt)
    job: Any = SimpleNamespace(spec=SimpleNamespace(title="run"))
    seen: list[Progress] = []
    if num_attempts is None:
        with pytest.raises(TrainingError, match="run: given up after 3 attempts; the last: the node is lost"):
            workers.run(job, seen.append)
    else:
        assert workers.run(job, seen.append)["attempts"] == num_attempts
        assert len(seen) == sum(map(len, attempts))


def test_an_elastic_run_waits_for_its_fewest_workers_and_starts_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups that start together take the same free CPUs; the one that finds none waited until its largest size was free."""
    scale, requested = ScaleSpec(num_workers=(1, 4)), list[int]()
    monkeypatch.setattr(state, "state", SimpleNamespace(get_draining_nodes=dict, disconnect=lambda: None))
    monkeypatch.setattr(state, "total_resources_per_node", lambda: {"first": {"CPU": 8.0}})
    monkeypatch.setattr(state, "available_resources_per_node", lambda: {"first": {"CPU": 1.0}})
    monkeypatch.setattr(group, "FREE_SECONDS", 0.0)

    def placement_group(bundles: list[dict[str, float]]) -> Any:
        requested.append(len(bundles))
        return SimpleNamespace(wait=lambda timeout_seconds: True)

    monkeypatch.setattr("ray.util.placement_group", placement_group)
    monkeypatch.setattr("ray.util.remove_placement_group", lambda request: None)
    workers = group.WorkerGroup(choose(scale, [{"CPU": 8.0}]), scale, tmp_path, lambda line: None, StartTimes(tmp_path, lambda line: None))
    workers._num_workers = 4
    workers._wait_for_room()
    assert requested == [1]
    assert workers._fitting_size() == 1


@pytest.mark.parametrize(
    ("nodes", "scale", "num_threads", "is_one_machine"),
    [
        (["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"], ScaleSpec(num_workers=2, concurrent_runs=2), 2, False),
        (["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"], ScaleSpec(), 2, False),
        (["127.0.0.1"] * 4, ScaleSpec(num_workers=2, concurrent_runs=2), 2, True),
        (["127.0.0.1"] * 4, ScaleSpec(), 8, True),
    ],
)
def test_workers_of_a_cluster_share_its_cores_not_those_of_the_head_and_none_has_more_threads_than_its_machine_cores(
    nodes: list[str], scale: ScaleSpec, num_threads: int, is_one_machine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 64 cores gave each of four workers 16 threads on nodes of two cores. They share a file if all nodes are on one machine."""
    configs: list[dict[str, Any]] = []
    rendezvous: list[Any] = []
    monkeypatch.setattr("tasks.workers.board.Board", SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: None)))
    monkeypatch.setattr(group.WorkerGroup, "_time_start", lambda *_: None)
    monkeypatch.setattr(group.WorkerGroup, "_is_large_enough", lambda *_: True)
    monkeypatch.setattr(
        "tasks.workers.rendezvous.Trainer",
        lambda serve, train_loop_config, backend_config, scaling_config, **_: (
            configs.append({**train_loop_config, "strategy": scaling_config.placement_strategy})
            or rendezvous.append(backend_config)
            or SimpleNamespace(fit=lambda: None)
        ),
    )
    all_nodes = [("127.0.0.1", 0.0, True), *((node, 2.0, True) for node in nodes), ("10.0.0.9", 64.0, False)]
    told = [{"NodeManagerAddress": node, "Resources": {"CPU": cpus}, "Alive": is_alive} for node, cpus, is_alive in all_nodes]
    monkeypatch.setattr("ray.nodes", lambda: told)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0" * 56))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for module in (group, connection):
        monkeypatch.setattr(module, "ray_cluster", lambda: "127.0.0.1:6379")
    placement = choose(scale, [{"CPU": 2.0}] * 4)
    workers = group.WorkerGroup(placement, scale, tmp_path, lambda line: None, StartTimes(tmp_path, lambda line: None))
    workers.start()
    assert [(config["num_threads"], config["strategy"]) for config in configs] == [(num_threads, "SPREAD")], "no node has all threads"
    assert [entry.meeting_file is not None for entry in rendezvous] == [is_one_machine]


def test_a_head_with_gpus_and_no_cpus_takes_no_loader_from_the_nodes() -> None:
    """`ray start --head --num-cpus=0` announces the machine's GPUs all the same."""
    head, node = {"CPU": 0.0, "GPU": 2.0}, {"CPU": 32.0, "GPU": 2.0}
    assert choose(ScaleSpec(), [head, node]) == choose(ScaleSpec(), [node])
    assert choose(ScaleSpec(), [head]).device == "cuda"
