"""k-means and its initial centres: the same in every run, as good as scikit-learn's, and robust to degenerate inputs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_mutual_info_score

from dml_core.evaluation.clustering import SEED_STEP, adjusted_mutual_information, clustering_metrics, kmeans, lloyd, pairwise_f1
from dml_core.evaluation.config import KMeansConfig, Metric
from dml_core.evaluation.kmeans_init import _kept, first_clusters
from dml_core.evaluation.retrieval.geometry import as_points


def first_centres(embeddings: np.ndarray, num_centres: int, seed: int) -> np.ndarray:
    return first_clusters(embeddings, num_centres, seed)[0]


def blobs(num_classes: int, size: int, width: float, num_dimensions: int = 8) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(num_classes), size)
    noise = width * generator.standard_normal((len(labels), num_dimensions))
    return (5 * generator.standard_normal((num_classes, num_dimensions))[labels] + noise).astype(np.float32), labels


def test_clusters_far_apart_are_found_and_score_one() -> None:
    embeddings, labels = blobs(12, 9, width=0.01)
    clusters, inertia = kmeans(as_points(embeddings, "euclidean"), 12, KMeansConfig(), seed=0)
    assert clustering_metrics(labels, clusters) == pytest.approx({"nmi": 1, "nmi_geometric": 1, "ami": 1, "f1": 1})
    means = np.stack([embeddings[labels == code].mean(axis=0) for code in range(12)])
    assert inertia == pytest.approx(((embeddings - means[labels]) ** 2).sum(), rel=1e-3)


@pytest.mark.parametrize("width", [1.0, 1e-4, 1e-6])
def test_clusters_of_directions_that_are_all_alike_are_found(width: float) -> None:
    """A collapsed network's cosines differ from 1 by less than float32's rounding; its classes may be apart all the same."""
    embeddings, labels = blobs(12, 9, width=0.01)
    directions = np.eye(8)[0] + width * embeddings / np.linalg.norm(embeddings, axis=1).max()
    clusters, _ = kmeans(as_points(directions, "cosine"), 12, KMeansConfig(), seed=0)
    assert clustering_metrics(labels, clusters)["nmi"] == pytest.approx(1)


def test_the_same_clusters_on_every_run_and_others_for_another_seed() -> None:
    points = as_points(blobs(30, 10, width=6.0)[0], "cosine")
    first, again, other = (kmeans(points, 30, KMeansConfig(num_iterations=3), seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_of_several_runs_the_best_counts_and_each_is_that_of_its_own_seed() -> None:
    points = as_points(blobs(30, 10, width=6.0)[0], "euclidean")
    alone = [kmeans(points, 30, KMeansConfig(), 4 + run * SEED_STEP)[1] for run in range(5)]
    assert kmeans(points, 30, KMeansConfig(num_runs=5), seed=4)[1] == min(alone)
    assert len(set(alone)) == 5


def test_runs_of_neighbouring_seeds_share_no_first_centres() -> None:
    """Otherwise an embedding that is the same for all seeds has nearly the same NMI for all: the best of nine shared runs of ten."""
    points = as_points(blobs(30, 10, width=6.0)[0], "euclidean")
    best = {kmeans(points, 30, KMeansConfig(num_runs=10), seed)[1] for seed in range(8)}
    assert len(best) == 8


def test_more_iterations_come_nearer() -> None:
    points = as_points(blobs(30, 10, width=6.0)[0], "euclidean")
    one, many = (kmeans(points, 30, KMeansConfig(num_iterations=num_iterations), seed=0)[1] for num_iterations in (1, 25))
    assert many < one


def test_the_inertia_of_a_large_cluster_is_that_of_all_its_points() -> None:
    """600 points around 0, whose squares are 2 times 1 and 598 times 4095^2: float32 cannot represent the sum."""
    embeddings = np.repeat([[-4095.0], [-1.0], [1.0], [4095.0]], [299, 1, 1, 299], axis=0).astype(np.float32)
    assert kmeans(as_points(embeddings, "euclidean"), 1, KMeansConfig(), seed=0)[1] == 598 * 4095**2 + 2


def test_inertia_is_no_worse_than_that_of_scikit_learn() -> None:
    embeddings, _ = blobs(80, 6, width=4.0)
    points = as_points(embeddings, "euclidean")
    ours = np.mean([kmeans(points, 80, KMeansConfig(), seed)[1] for seed in range(5)])
    theirs = np.mean([KMeans(80, n_init=1, max_iter=25, tol=0, random_state=seed).fit(embeddings).inertia_ for seed in range(5)])
    assert ours <= 1.01 * theirs


def test_first_centres_are_different_points_one_from_each_cluster() -> None:
    embeddings, labels = blobs(40, 5, width=0.01)
    chosen = first_centres(embeddings, 40, seed=0)
    assert len(np.unique(labels[chosen])) == 40


def test_as_many_first_centres_as_asked_for_whatever_the_scale() -> None:
    embeddings, _ = blobs(1, 70, width=1.0)
    for num_centres in (1, 2, 3, 35, 69, 70):
        chosen = first_centres(embeddings, num_centres, seed=0)
        assert len(set(chosen.tolist())) == len(chosen) == num_centres
        np.testing.assert_array_equal(first_centres(embeddings / 1024, num_centres, seed=0), chosen)


def test_the_first_clusters_are_those_of_the_nearest_centres() -> None:
    embeddings, _ = blobs(30, 10, width=6.0)
    chosen, clusters = first_clusters(embeddings, 30, seed=0)
    distances = ((embeddings[:, None].astype(np.float64) - embeddings[chosen]) ** 2).sum(axis=2)
    np.testing.assert_array_equal(clusters, distances.argmin(axis=1))


def test_bfloat16_serves_large_work_as_long_as_distances_are_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen centre is farther than the nearest by at most the error of bfloat16; points of tight clusters get their own centre."""
    monkeypatch.setattr("dml_core.evaluation.threads.SMALLEST_WORK", 1)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)  # without the instructions it is slower, with the same result
    embeddings, _ = blobs(30, 10, width=6.0)
    chosen, clusters = first_clusters(embeddings, 30, seed=0)
    distances = ((embeddings[:, None].astype(np.float64) - embeddings[chosen]) ** 2).sum(axis=2)
    found, largest = distances[np.arange(len(clusters)), clusters], (embeddings**2).sum(axis=1).max()
    assert (found != distances.min(axis=1)).any()
    assert (found - distances.min(axis=1)).max() < largest / 32
    embeddings, labels = blobs(10, 20, width=0.01)
    chosen, clusters = first_clusters(embeddings, 20, seed=0)
    assert (labels[chosen[clusters]] == labels).all()


def test_lloyd_does_what_the_plain_algorithm_does() -> None:
    """The plain algorithm compares every point with every centre in float64, however few centres moved."""
    for seed in range(5):
        embeddings, _ = blobs(40, 10, width=4.0)
        chosen, clusters = first_clusters(embeddings, 40, seed)
        expected = clusters
        for num_iterations in range(1, 12):
            means = np.stack([embeddings[expected == cluster].mean(axis=0, dtype=np.float64) for cluster in range(40)])
            distances = ((embeddings[:, None] - means) ** 2).sum(axis=2)
            expected = distances.argmin(axis=1)
            actual, inertia = lloyd(embeddings, chosen, clusters, num_iterations)
            np.testing.assert_array_equal(actual, expected)
            assert inertia == pytest.approx(distances.min(axis=1).sum(), rel=1e-5)


def test_a_cluster_that_loses_its_points_gets_the_farthest_one() -> None:
    """The centres move to 0.5, 2 and 7; no point is nearest to 2, and -10 is the point farthest from its own centre, 0.5."""
    points = np.array([[-10], [0], [1], [14], [5], [9]], dtype=np.float32)
    clusters, inertia = lloyd(points, np.array([1, 0, 4]), np.array([1, 0, 0, 1, 2, 2]), 1)
    assert clusters.tolist() == [1, 0, 0, 2, 2, 2]
    assert inertia == 0.5**2 + 0.5**2 + 7**2 + 2**2 + 2**2


def test_of_a_round_s_choices_those_near_an_earlier_one_are_dropped() -> None:
    """For points at 0, 10, 0, 10.1, 20, these parts of the squared distances remain: all, none, 0.01 of a million, all."""
    points = torch.tensor([[0.0], [10.0], [0.0], [10.1], [20.0]])
    nearest = np.array([1, 1, 1, 1e6, 0], dtype=np.float32)
    assert _kept(points, nearest, np.random.default_rng(0)).tolist() == [0, 1, 4]
    assert _kept(points[[0, 2]], np.zeros(2, dtype=np.float32), np.random.default_rng(0)).tolist() == [0]


@pytest.mark.parametrize("num_distinct", [1, 3])
def test_first_centres_of_points_that_coincide_are_different_points(num_distinct: int) -> None:
    embeddings = np.repeat(np.eye(3, 4, dtype=np.float32)[:num_distinct], 5, axis=0)
    for seed in range(5):
        assert len(set(first_centres(embeddings, 5, seed).tolist())) == 5


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("num_distinct", [1, 5, 19])
def test_equal_embeddings_are_in_one_cluster_if_few_are_distinct(num_distinct: int, metric: Metric) -> None:
    """A network with few outputs: otherwise the NMI depends on the rounding of means."""
    which = np.arange(num_distinct).repeat(20)
    embeddings = np.random.default_rng(0).standard_normal((num_distinct, 64)).astype(np.float32)[which]
    clusters, inertia = kmeans(as_points(embeddings, metric), min(20, len(which)), KMeansConfig(), seed=0)
    assert clustering_metrics(which, clusters)["nmi"] == pytest.approx(1)
    assert inertia == 0


def test_every_point_its_own_cluster(capfd: pytest.CaptureFixture[str]) -> None:
    embeddings, _ = blobs(1, 20, width=1.0)
    clusters, inertia = kmeans(as_points(embeddings, "euclidean"), 20, KMeansConfig(), seed=0)
    assert len(set(clusters.tolist())) == 20
    assert inertia == pytest.approx(0, abs=1e-4)
    assert capfd.readouterr() == ("", "")  # FAISS warns of few points unless this is disabled


def test_f1_worked_out_by_hand() -> None:
    # Pairs in a cluster: 1 of 3 and 1 of 1 have one class, (a, a) and (b, b). Pairs of one class: 4.
    classes, clusters = np.array([0, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 1])
    # True pairs 2; clustered pairs 3 + 1 = 4; class pairs 1 + 3 = 4: precision = recall = 1/2.
    assert pairwise_f1(classes, clusters) == 0.5
    assert pairwise_f1(np.arange(4), np.arange(4)) == 1
    # One class forms a cluster, the other is split into two: precision 1, recall 1/2.
    assert pairwise_f1(np.array([0, 0, 1, 1]), np.array([0, 0, 1, 2])) == 2 / 3


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=2, max_size=60), st.integers(0, 2**16))
def test_names_of_classes_and_clusters_do_not_matter(pairs: list[tuple[int, int]], seed: int) -> None:
    codes, clusters = np.array(pairs).T
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(pairs))
    renamed = clustering_metrics(generator.permutation(5)[codes][order], generator.permutation(6)[clusters][order])
    assert renamed == pytest.approx(clustering_metrics(codes, clusters), abs=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=2, max_size=9))
def test_ami_of_few_samples_is_that_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    codes, clusters = np.array(pairs).T
    assert adjusted_mutual_information(codes, clusters) == pytest.approx(adjusted_mutual_info_score(codes, clusters), abs=1e-9)
