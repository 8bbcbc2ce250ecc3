"""k-means and its first centres: the same on every run, as good as scikit-learn's, and at home with awkward inputs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from dml_core.evaluation.clustering import clustering_metrics, kmeans, pairwise_f1
from dml_core.evaluation.config import KMeansConfig
from dml_core.evaluation.geometry import as_points
from dml_core.evaluation.seeding import first_centres


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


def test_the_same_clusters_on_every_run_and_others_for_another_seed() -> None:
    points = as_points(blobs(30, 10, width=6.0)[0], "cosine")
    first, again, other = (kmeans(points, 30, KMeansConfig(num_iterations=3), seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_more_runs_never_end_worse() -> None:
    points = as_points(blobs(30, 10, width=6.0)[0], "euclidean")
    one, four = (kmeans(points, 30, KMeansConfig(num_runs=num_runs), seed=0)[1] for num_runs in (1, 4))
    assert four <= one


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


@pytest.mark.parametrize("num_distinct", [1, 3])
def test_first_centres_of_points_that_coincide_are_different_points(num_distinct: int) -> None:
    embeddings = np.repeat(np.eye(3, 4, dtype=np.float32)[:num_distinct], 5, axis=0)
    assert len(set(first_centres(embeddings, 5, seed=0).tolist())) == min(5, len(embeddings))


def test_every_point_its_own_cluster() -> None:
    embeddings, _ = blobs(1, 20, width=1.0)
    clusters, inertia = kmeans(as_points(embeddings, "euclidean"), 20, KMeansConfig(), seed=0)
    assert len(set(clusters.tolist())) == 20
    assert inertia == pytest.approx(0, abs=1e-4)


def test_f1_worked_out_by_hand() -> None:
    # Pairs in one cluster: (a, a), (b, b), two mixed with the third of each: 1 of 3 and 1 of 1 right; pairs of one class: 4.
    classes, clusters = np.array([0, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 1])
    # True pairs 2; clustered pairs 3 + 1 = 4; class pairs 1 + 3 = 4: precision = recall = 1/2.
    assert pairwise_f1(classes, clusters) == 0.5
    assert pairwise_f1(np.arange(4), np.arange(4)) == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=2, max_size=60), st.integers(0, 2**16))
def test_names_of_classes_and_clusters_do_not_matter(pairs: list[tuple[int, int]], seed: int) -> None:
    codes, clusters = np.array(pairs).T
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(pairs))
    renamed = clustering_metrics(generator.permutation(5)[codes][order], generator.permutation(6)[clusters][order])
    assert renamed == pytest.approx(clustering_metrics(codes, clusters), abs=1e-9)
