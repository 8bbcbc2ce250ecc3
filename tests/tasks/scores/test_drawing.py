"""The heading of a run's figures."""

from tasks.scores.drawing import titled


def test_the_title_has_recall_at_the_smallest_k() -> None:
    metrics = {"recall@4": 0.75, "recall@2": 0.5, "recall@1_class_mean": 0.3, "nmi": 0.1}
    assert titled("d / softmax / seed 0", metrics, (4, 2)) == "d / softmax / seed 0: Recall@2 50.0 %"
