"""Centroid distances: compared with a loop over pairs, known values of one-hot centroids, and K-means draws by seed."""

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.measurements.centroid_distances import METRICS, measure
from tests.measurements.conftest import MakeRun

TWO_LAYERS = {"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": "two_layer", "embedding_dim": 8}}


def distances(finished: MakeRun, tmp_path: Path, **settings) -> list[float]:
    scores = measure(finished("discriminative", model=TWO_LAYERS, **settings), Config(), tmp_path)
    assert tuple(scores) == METRICS
    return list(scores.values())


def test_one_hot_centroids_are_all_as_far_apart(finished: MakeRun, tmp_path: Path) -> None:
    root = math.sqrt(2)
    assert distances(finished, tmp_path, num_classes=7) == pytest.approx([root, root, root, 0], abs=1e-7)


def test_those_of_k_means_are_measured_pair_by_pair(finished: MakeRun, tmp_path: Path) -> None:
    run = finished("discriminative", {"centroids": "kmeans"}, num_classes=6, model=TWO_LAYERS)
    centroids = run.system.loss.fixed_centroids().numpy().astype(np.float64)
    assert np.linalg.norm(centroids, axis=1) == pytest.approx([1] * 6)
    of_pairs = [math.dist(one, other) for one, other in combinations(centroids.tolist(), 2)]
    mean = sum(of_pairs) / 15
    std = math.sqrt(sum((distance - mean) ** 2 for distance in of_pairs) / 15)
    assert list(measure(run, Config(), tmp_path).values()) == pytest.approx([min(of_pairs), max(of_pairs), mean, std])


def test_every_run_draws_its_own_centroids_where_asked_for(finished: MakeRun, tmp_path: Path) -> None:
    fixed, drawn = ({"centroids": "kmeans", "centroid_seed": seed} for seed in (0, None))
    assert distances(finished, tmp_path, options=fixed, seed=0) == distances(finished, tmp_path, options=fixed, seed=1)
    assert distances(finished, tmp_path, options=drawn, seed=0) == distances(finished, tmp_path, options=drawn, seed=0)
    assert distances(finished, tmp_path, options=drawn, seed=0) != distances(finished, tmp_path, options=drawn, seed=1)


def test_the_published_distances_of_cub_are_met(finished: MakeRun, tmp_path: Path) -> None:
    """Table 3 for K-means of 100 classes, with the tolerances of the table's file."""
    scores = distances(finished, tmp_path, options={"centroids": "kmeans"}, num_classes=100)
    for value, published, tolerance in zip(scores, (1.21, 1.63, 1.418, 0.061), (0.05, 0.05, 0.005, 0.005), strict=True):
        assert value == pytest.approx(published, abs=tolerance)


def test_a_loss_without_fixed_centroids_is_refused(finished: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"^run: the loss 'softmax' has no fixed centroids$"):
        measure(finished("softmax"), Config(), tmp_path)
