"""Replicas on Ray without Ray: opened from folders, and called through a handle whose replicas die."""

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.exceptions import HTTPException

from dml_core.errors import ConfigError
from dml_core.index.index import Index
from dml_core.index.writing import remove_items
from dml_core.network_description import GraphFile
from dml_core.trained import TrainedModel
from tasks.serving import ray_replicas
from tasks.serving.ray_replicas import NUM_ATTEMPTS, RayReplica, RayReplicas
from tasks.serving.replicas import ServiceError
from tests.tasks.serving.conftest import IDENTITY, Made


class Handle:
    """A handle to a replica in this process: the first calls raise the given errors."""

    def __init__(self, replica: Any, *errors: Exception) -> None:
        self.errors = list(errors)
        self.replica = replica

    def __getattr__(self, method: str) -> Any:
        async def remote(*arguments: Any) -> Any:
            if self.errors:
                raise self.errors.pop(0)
            return await getattr(self.replica, method)(*arguments)

        return SimpleNamespace(remote=remote)


@pytest.fixture(scope="module")
def replica(made: Made) -> RayReplica:
    versions = (IDENTITY, made.load().weights_sha256, Index.open(made.index).info.version)
    return RayReplica(str(made.model), str(made.index), versions, 1, 32)


def test_a_replica_does_not_start_on_what_was_replaced_since(made: Made, tmp_path: Path) -> None:
    """A replica that Ray restarts would answer from another index than the others, with other positions."""
    shutil.copytree(made.index, tmp_path / "index")
    weights = made.load().weights_sha256
    versions = (IDENTITY, weights, Index.open(tmp_path / "index").info.version)
    remove_items(tmp_path / "index", [made.files[0].name])
    with pytest.raises(ConfigError, match=r"index: changed since the service started; start it again"):
        RayReplica(str(made.model), str(tmp_path / "index"), versions, 1, 32)
    for identity, of_training in (("f" * 32, weights), (IDENTITY, "0" * 64)):  # trained again, a network has other weights
        with pytest.raises(ConfigError, match=r"model: changed since the service started; start it again"):
            RayReplica(str(made.model), None, (identity, of_training, None), 1, 32)


def test_a_replica_does_not_start_on_another_export_of_its_network(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = GraphFile(format="onnx", name="network.onnx", precision="int8")
    description = made.load().description.model_copy(update={"graph": graph, "file_sha256": "1" * 64})
    monkeypatch.setattr(
        ray_replicas, "load_model", lambda folder: TrainedModel(description, IDENTITY, lambda views: np.zeros((len(views), 4)))
    )
    with pytest.raises(ConfigError, match="export: changed since the service started; start it again"):
        RayReplica("export", None, (IDENTITY, "0" * 64, None), 1, 32)


@pytest.mark.parametrize("num_deaths", [0, 1, NUM_ATTEMPTS - 1])
def test_a_request_whose_replica_died_is_sent_to_another(
    made: Made, replica: RayReplica, monkeypatch: pytest.MonkeyPatch, num_deaths: int
) -> None:
    monkeypatch.setattr(ray_replicas, "AGAIN_SECONDS", 0.0)
    data = [path.read_bytes() for path in made.files[:3]]

    async def ask() -> Any:
        replicas = RayReplicas(Handle(replica, *[RayActorError()] * num_deaths))
        return await replicas.check() if not num_deaths else None, await replicas.answer(data), await replicas.neighbours(3, 2, True)

    is_well, embedded, neighbours = asyncio.run(ask())
    assert is_well in (True, None)
    np.testing.assert_allclose(embedded.embeddings, made.load().embed(data), rtol=0, atol=1e-5)
    assert [len(hits) for hits in neighbours.hits] == [2]


@pytest.mark.parametrize("errors", [[RayActorError()] * NUM_ATTEMPTS, [BackPressureError(1, 1)]])
def test_a_request_that_no_replica_takes_is_refused(replica: RayReplica, monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> None:
    monkeypatch.setattr(ray_replicas, "AGAIN_SECONDS", 0.0)
    with pytest.raises(HTTPException, match="no replica is available") as refused:
        asyncio.run(RayReplicas(Handle(replica, *errors)).answer([b"not read"]))
    assert refused.value.status_code == 503
    assert not asyncio.run(RayReplicas(Handle(replica, *errors)).check())


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 3, 8])
def test_every_replica_finds_a_part_of_a_gpu_and_no_more_threads_than_its_node_has_cores(
    made: Made, monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    """Three replicas of two thirds of a GPU each do not fit on two, and Serve would wait for the third for ever."""
    requested, threads, counts = list[float](), list[int](), list[int]()

    def options(num_replicas: int, ray_actor_options: dict[str, Any], **_: object) -> Any:
        counts.append(num_replicas)
        requested.append(ray_actor_options["num_gpus"])
        return CLASS

    def deployment(cls: type) -> Any:
        return SimpleNamespace(options=options)

    CLASS = SimpleNamespace(bind=lambda *given: threads.append(given[3]))
    monkeypatch.setattr(ray_replicas.ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray_replicas.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": float(num_gpus)})
    nodes = [{"NodeManagerAddress": machine, "Alive": True, "Resources": {"CPU": 1.0}} for machine in "aabbccdd"]
    monkeypatch.setattr(ray_replicas.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_replicas.ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    monkeypatch.setattr(ray_replicas, "serve", SimpleNamespace(deployment=deployment, start=lambda **_: None, run=lambda *_, **__: None))
    for num_replicas in range(1, 13):
        ray_replicas.start_replicas(made.model, made.load(), None, num_replicas, 1, "local")
        each = round(10_000 * requested[-1])  # Ray counts four decimals
        assert (num_gpus * (10_000 // each) >= num_replicas) if num_gpus else each == 0, num_replicas
        assert threads[-1] == min(2, max(1, 8 // num_replicas))
    for address, num_default in (("local", max(1, num_gpus)), ("auto", 1)):  # a cluster's GPUs are not this user's alone
        ray_replicas.start_replicas(made.model, made.load(), None, None, 1, address)
        assert counts[-1] == num_default


def test_a_cluster_that_is_down_is_reported_at_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_replicas.ray, "init", lambda *_, **__: pytest.fail("Ray is asked, which tries for 205 s"))
    with pytest.raises(ServiceError, match=r"^the replicas did not start: Ray at 127\.0\.0\.1:1 does not answer; start it"):
        ray_replicas.start_replicas(made.model, made.load(), None, 1, 1, "127.0.0.1:1")
