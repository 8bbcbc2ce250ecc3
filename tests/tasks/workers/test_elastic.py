"""A run that loses and gains workers, on a Ray cluster of several nodes on this machine, ends near the weights of a fixed group."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray.cluster_utils import Cluster

from dml_core.config import merge, parse
from dml_core.training.checkpoints.file import load_checkpoint
from dml_core.training.config import TrainingConfig
from dml_core.training.history import read_history
from tasks.runs.specs import ScaleSpec
from tasks.start_times import StartTimes
from tasks.workers import group
from tasks.workers.connection import start_ray, stop_ray
from tasks.workers.group import WorkerGroup
from tasks.workers.jobs import Job
from tests.tasks.workers.conftest import Disturbance, job

pytestmark = [pytest.mark.slow, pytest.mark.proof]
SCALE = ScaleSpec(num_workers=(1, 2), device="cpu", max_failures=1)


LONG, STEPS = 10, 20  # few but long steps: over many steps rounding differences would grow
GENTLE = {
    "model": {"backbone": {"width": 96}},
    "sampler": {"batch_size": 64},
    "optimiser": {"learning_rate": 0.001, "groups": {"loss": {"learning_rate": 0.01}}},
}


@dataclass
class Nodes:
    """A cluster with a head without CPUs, and nodes of one CPU each."""

    cluster: Any
    nodes: list[Any]

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1))

    def lose(self) -> None:
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def announce_loss(self) -> None:
        """Announce the loss of a machine, with a deadline, as a cloud provider does."""
        node = self.nodes.pop()
        command = ["drain-node", "--address", self.cluster.address, "--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        more = ["--reason-message", "spot", "--deadline-remaining-seconds", "120"]
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *command, *more], check=True, capture_output=True)


@pytest.fixture(scope="module")
def nodes(ray_settings: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for name in ("RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"):
        ray_settings.delenv(name, raising=False)  # a cluster's settings differ from those of a Ray of one machine
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray_settings.setenv("RAY_ADDRESS", cluster.address)
    made = Nodes(cluster, [])
    made.add()
    made.add()
    yield made
    stop_ray()
    cluster.shutdown()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def workers(nodes: Nodes, starts: StartTimes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    made = WorkerGroup(start_ray(SCALE), SCALE, tmp_path_factory.mktemp("ray"), lambda text: None, starts)
    yield made
    made.close()


@pytest.fixture(scope="module")
def two(workers: WorkerGroup, many_images: Path, state: Path) -> str:
    """An undisturbed run of two workers."""
    facts = workers.run(long_job(many_images, state, "two"), lambda message: None)
    assert (facts["num_workers"], facts["attempts"]) == (2, 1)
    return "two"


def long_job(packed: Path, state: Path, name: str) -> Job:
    made = job(packed, state, name, LONG, scale=ScaleSpec(checkpoint_every_steps=5))
    training = parse(TrainingConfig, merge(made.spec.training.model_dump(), GENTLE), "test")
    return replace(made, spec=made.spec.model_copy(update={"training": training}))


def weights(state: Path, name: str) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(state / "store/train" / name, name)
    assert checkpoint is not None
    assert (state / "store/train" / name / "history.jsonl").read_text().count("\n") == LONG * STEPS
    return dict(checkpoint["system"])


def assert_near(state: Path, name: str, fixed: str) -> None:
    """Check that a run whose group changed differs from one of a fixed group only by the later order of sums."""
    losses = [[row["loss"] for row in read_history(state / "store/train" / run)] for run in (name, fixed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    expected = weights(state, fixed)
    for key, value in weights(state, name).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


def test_a_group_of_a_cluster_starts_no_process_that_serves_nothing(workers: WorkerGroup, two: str) -> None:
    names = {name for child in psutil.Process().children(recursive=True) if (name := "".join(child.cmdline()[:1])).startswith("ray::")}
    for part, is_there in (
        ("RayTrainWorker", True),
        ("PreemptionWatcher", True),
        ("PlacementGroupCleaner", False),
        ("DatasetManager", False),
    ):
        assert any(part in name for name in names) == is_there, names


def test_a_run_whose_machine_dies_goes_on_with_fewer(workers: WorkerGroup, nodes: Nodes, many_images: Path, state: Path, two: str) -> None:
    loses = Disturbance(nodes.lose)
    facts = workers.run(long_job(many_images, state, "loses"), loses)
    assert loses.at is not None
    assert (facts["num_workers"], facts["attempts"], facts["taken_up"]) == (1, 2, True)
    assert_near(state, "loses", two)


def test_a_run_takes_up_a_machine_that_joins(
    workers: WorkerGroup,
    nodes: Nodes,
    many_images: Path,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = workers.run(long_job(many_images, state, "one"), lambda message: None)
    assert (alone["num_workers"], alone["attempts"]) == (1, 1)
    monkeypatch.setattr(group, "ROOM_SECONDS", 1.0)
    gains = Disturbance(nodes.add)
    facts = workers.run(long_job(many_images, state, "gains"), gains)
    assert gains.at is not None
    assert (facts["num_workers"], facts["attempts"], facts["taken_up"]) == (2, 2, True)
    assert_near(state, "gains", "one")


def test_a_machine_that_is_to_be_taken_away_is_left_with_a_checkpoint(
    workers: WorkerGroup, nodes: Nodes, many_images: Path, state: Path, two: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The departure does not count as a failure."""
    monkeypatch.setattr(workers, "_scale", SCALE.model_copy(update={"max_failures": 0}))
    leaves = Disturbance(nodes.announce_loss)
    facts = workers.run(long_job(many_images, state, "leaves"), leaves)
    assert leaves.at is not None
    assert (facts["num_workers"], facts["attempts"], facts["taken_up"]) == (1, 2, True)
    assert_near(state, "leaves", two)
