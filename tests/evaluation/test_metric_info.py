"""The table of metrics: complete, and read in the order of a report's columns."""

import pytest

from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate
from dml_core.evaluation.metric_info import METRICS, metric_info, recall_k, table_columns
from tests.evaluation.cases import make_inputs


def test_every_metric_of_the_evaluator_has_its_line() -> None:
    measured = evaluate(*make_inputs("random"), EvaluationConfig())
    assert {name for name in measured if recall_k(name) is None and not name.startswith("num_")} == set(METRICS)
    assert metric_info("recall@4").title == "R@4"


@pytest.mark.parametrize(
    ("metric", "has_one"), [("recall@1", True), ("nmi", True), ("csc", False), ("num_queries", False), ("recall@1_class_mean", False)]
)
def test_only_metrics_of_which_more_is_better_have_a_best(metric: str, has_one: bool) -> None:
    assert metric_info(metric).higher_is_better is has_one


def test_recalls_rise_by_k_and_what_only_explains_is_left_out() -> None:
    measured = ["nmi", "recall@10", "recall@1_class_mean", "nmi_geometric", "recall@2", "map@r", "num_queries", "map@r_low"]
    assert table_columns(measured) == ["recall@2", "recall@10", "map@r", "nmi"]


def test_only_a_whole_k_is_one() -> None:
    assert recall_k("recall@16") == 16
    assert [
        recall_k(name) for name in ("recall@1_low", "recall@", "16", "map@r", "recall@0", "recall@01", "recall@²", f"recall@{'9' * 5000}")
    ] == [None] * 8
