"""Evaluation and validation on a pretended GPU give the CPU's results."""

from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dml_core.data.store.packed import PackedDataset
from dml_core.evaluation.clustering import kmeans, lloyd
from dml_core.evaluation.config import EvaluationConfig, KMeansConfig, Metric
from dml_core.evaluation.evaluator import evaluate
from dml_core.evaluation.kmeans_init import first_clusters
from dml_core.evaluation.retrieval import neighbours
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.retrieval.sweep import Shard, score_queries
from dml_core.training.validation import HeldOutRecall, ScoredImages
from tests.conftest import small_training
from tests.evaluation.cases import KINDS, make_inputs
from tests.gpu.pretended import pretended_gpu

CPU = torch.device("cpu")


def blobs(num_classes: int, size: int) -> NDArray[np.float32]:
    random = np.random.default_rng(0)
    centres = 5 * random.standard_normal((num_classes, 8))
    return (np.repeat(centres, size, axis=0) + 4 * random.standard_normal((num_classes * size, 8))).astype(np.float32)


def test_the_pretended_gpu_refuses_what_a_gpu_refuses() -> None:
    with pretended_gpu() as gpu:
        values = torch.arange(6.0, device=gpu).view(2, 3)
        assert not values.is_cpu
        assert (values @ values.T).cpu().tolist() == [[5, 14], [14, 50]]
        with pytest.raises(RuntimeError, match="tensors on the GPU and on the CPU"):
            values + torch.ones(2, 3)
        with pytest.raises((RuntimeError, TypeError)):
            values.numpy()


@pytest.mark.parametrize("max_block_bytes", [2**26, 16 * 40 * 40])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("kind", KINDS)
def test_retrieval_on_a_gpu_has_the_ranks_of_the_cpu(kind: str, metric: Metric, max_block_bytes: int) -> None:
    embeddings, labels = make_inputs(kind)
    points, codes, index = as_points(embeddings, metric), np.unique(labels, return_inverse=True)[1], np.arange(len(labels))
    shards = [Shard(lambda: points, codes)]
    expected = score_queries(shards, points, codes, index, 2**26, CPU)
    with pretended_gpu() as gpu:
        found = score_queries(shards, points, codes, index, max_block_bytes, gpu)
    for one, other in zip(astuple(found), astuple(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_k_means_on_a_gpu_finds_the_clusters_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Centres and points whose distances differ by more than rounding, in several blocks."""
    embeddings = blobs(40, 10)
    chosen, clusters = first_clusters(embeddings, 40, seed=0)
    expected, inertia = lloyd(embeddings, chosen, clusters, 25)
    monkeypatch.setattr("dml_core.evaluation.kmeans_init.NUM_ROWS_ON_GPU", 64)
    monkeypatch.setattr("dml_core.evaluation.clustering.PRODUCTS_ON_GPU", 64 * 40)
    with pretended_gpu() as gpu:
        on_gpu = first_clusters(embeddings, 40, 0, gpu)
        found = lloyd(embeddings, chosen, clusters, 25, gpu)
        whole = kmeans(as_points(embeddings, "euclidean"), 40, KMeansConfig(), 0, gpu)
    np.testing.assert_array_equal(on_gpu[0], chosen)
    np.testing.assert_array_equal(on_gpu[1], clusters)
    np.testing.assert_array_equal(found[0], expected)
    assert found[1] == pytest.approx(inertia, rel=1e-5)
    assert whole[1] == pytest.approx(kmeans(as_points(embeddings, "euclidean"), 40, KMeansConfig(), 0)[1], rel=1e-5)


def test_the_whole_evaluation_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, labels = blobs(30, 6), np.repeat(np.arange(30), 6)
    expected = evaluate(embeddings, labels)
    with pretended_gpu() as gpu:
        monkeypatch.setattr("dml_core.evaluation.retrieval.sweep.usable_device", lambda _: gpu)
        monkeypatch.setattr("dml_core.evaluation.evaluator.usable_device", lambda _: gpu)
        found = evaluate(embeddings, labels, EvaluationConfig(device="cuda"))
    assert found == pytest.approx(expected, rel=1e-6)


def test_validation_scores_on_the_device_of_training(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, devices = small_training(), []

    def noted(*arguments: Any) -> Any:
        devices.append(arguments[-1])
        return score_queries(*arguments)

    monkeypatch.setattr("dml_core.training.validation.score_queries", noted)
    watch = HeldOutRecall(ScoredImages(torch.device("meta")), PackedDataset(packed, "test"), config.transform)
    random = np.random.default_rng(0)
    points, labels = random.standard_normal((40, 8)).astype(np.float32), np.repeat(np.arange(8), 5)
    with pretended_gpu() as gpu:
        found = watch._recall(as_points(points, "cosine"), labels, as_points(points, "cosine"), labels)
    assert found == evaluate(points, labels)["recall@1"]
    assert devices == [gpu]


@pytest.mark.parametrize(("num_neighbours", "on_gpu"), [(100, True), (2040, True), (2041, False)])
def test_searches_beyond_faiss_s_limit_on_a_gpu_use_the_cpu(monkeypatch: pytest.MonkeyPatch, num_neighbours: int, on_gpu: bool) -> None:
    """FAISS's index on a GPU is stood for by the CPU's: only the choice is seen here."""
    moved = []
    monkeypatch.setattr("faiss.get_num_gpus", lambda: 1)
    monkeypatch.setattr("faiss.GpuMultipleClonerOptions", lambda: type("Options", (), {})(), raising=False)
    monkeypatch.setattr("faiss.index_cpu_to_all_gpus", lambda index, _: moved.append(index) or index, raising=False)
    embeddings = np.random.default_rng(0).standard_normal((3000, 4)).astype(np.float32)
    gallery, queries = as_points(embeddings, "cosine"), as_points(embeddings[:9], "cosine")
    found = neighbours.nearest(gallery, queries, num_neighbours, "cuda")
    assert bool(moved) == on_gpu
    np.testing.assert_array_equal(found[0], neighbours.nearest(gallery, queries, num_neighbours)[0])
