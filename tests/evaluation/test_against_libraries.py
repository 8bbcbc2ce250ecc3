"""The evaluator agrees with pytorch-metric-learning and scikit-learn on inputs without ties, from two items to a thousand classes."""

import numpy as np
import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score, pair_confusion_matrix

from dml_core.evaluation.clustering import clustering_metrics, kmeans
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate
from dml_core.evaluation.retrieval.geometry import as_points

THEIR_NAMES = {
    "precision@1": "precision_at_1",
    "r_precision": "r_precision",
    "map@r": "mean_average_precision_at_r",
    "mrr": "mean_reciprocal_rank",
}


def clustered(num_samples: int, num_classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(num_samples) % num_classes)
    embeddings = generator.standard_normal((num_classes, 16))[labels] + 0.9 * generator.standard_normal((num_samples, 16))
    return (embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)).astype(np.float32), labels


@pytest.mark.parametrize(("num_samples", "num_classes"), [(300, 12), (40, 1), (2, 1), (2500, 1000), (60, 50)])
def test_self_retrieval_agrees_with_pytorch_metric_learning(num_samples: int, num_classes: int) -> None:
    embeddings, labels = clustered(num_samples, num_classes)
    # k covers all neighbours: with a smaller k, the reciprocal rank of a positive beyond k would count as 0.
    calculator = AccuracyCalculator(include=tuple(THEIR_NAMES.values()), k=num_samples - 1)
    theirs = calculator.get_accuracy(torch.from_numpy(embeddings), torch.from_numpy(labels))
    ours = evaluate(embeddings, labels, EvaluationConfig(clustering=False))
    for our_name, their_name in THEIR_NAMES.items():
        assert ours[our_name] == pytest.approx(theirs[their_name], abs=1e-6), our_name


def test_query_and_gallery_agree_with_pytorch_metric_learning() -> None:
    gallery, labels = clustered(200, 20)
    queries, query_labels = clustered(90, 20, seed=1)
    calculator = AccuracyCalculator(include=tuple(THEIR_NAMES.values()), k=200)
    theirs = calculator.get_accuracy(
        torch.from_numpy(queries), torch.from_numpy(query_labels), torch.from_numpy(gallery), torch.from_numpy(labels)
    )
    ours = evaluate(gallery, labels, EvaluationConfig(clustering=False), queries, query_labels)
    for our_name, their_name in THEIR_NAMES.items():
        assert ours[our_name] == pytest.approx(theirs[their_name], abs=1e-6), our_name


@pytest.mark.parametrize(("num_samples", "num_classes"), [(300, 12), (40, 1)])
def test_clusters_score_as_pytorch_metric_learning_scores_them(num_samples: int, num_classes: int) -> None:
    embeddings, labels = clustered(num_samples, num_classes)
    config = EvaluationConfig()
    clusters, _ = kmeans(as_points(embeddings, "cosine"), num_classes, config.kmeans, seed=0)
    calculator = AccuracyCalculator(include=("NMI", "AMI"), kmeans_func=lambda *_: torch.from_numpy(clusters))
    theirs = calculator.get_accuracy(torch.from_numpy(embeddings), torch.from_numpy(labels))
    ours = evaluate(embeddings, labels, config)
    assert (ours["nmi"], ours["ami"]) == pytest.approx((theirs["NMI"], theirs["AMI"]), abs=1e-9)


@pytest.mark.parametrize(
    ("num_samples", "num_classes", "num_clusters"),
    [(120, 5, 5), (120, 1, 1), (120, 1, 4), (120, 60, 60), (120, 60, 1), (2, 1, 1), (2, 2, 2), (2500, 1000, 1000)],
)
def test_clustering_metrics_agree_with_scikit_learn(num_samples: int, num_classes: int, num_clusters: int) -> None:
    generator = np.random.default_rng(0)
    codes = generator.permutation(np.arange(num_samples) % num_classes)
    others = generator.permutation(np.arange(num_samples) % num_clusters)
    clusters = np.where(generator.random(num_samples) < 0.6, codes % num_clusters, others)
    values = clustering_metrics(codes, clusters)
    assert values["nmi"] == pytest.approx(normalized_mutual_info_score(codes, clusters), abs=1e-12)
    geometric = normalized_mutual_info_score(codes, clusters, average_method="geometric")
    assert values["nmi_geometric"] == pytest.approx(geometric, abs=1e-12)
    assert values["ami"] == pytest.approx(adjusted_mutual_info_score(codes, clusters), abs=1e-9)
    (_, false_positives), (false_negatives, true_positives) = pair_confusion_matrix(codes, clusters)
    wrong = false_positives + false_negatives
    expected = 2 * true_positives / (2 * true_positives + wrong) if true_positives + wrong else 1
    assert values["f1"] == pytest.approx(expected, abs=1e-12)
