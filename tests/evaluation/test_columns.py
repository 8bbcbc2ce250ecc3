"""The metrics that a table shows, and their order."""

from dml_core.evaluation.columns import recall_k, table_columns


def test_recalls_rise_by_k_and_what_only_explains_is_left_out() -> None:
    measured = ["nmi", "recall@10", "recall@1_class_mean", "nmi_geometric", "recall@2", "map@r", "num_queries", "map@r_low"]
    assert table_columns(measured) == ["recall@2", "recall@10", "map@r", "nmi"]


def test_only_a_whole_k_is_one() -> None:
    assert recall_k("recall@16") == 16
    assert [recall_k(name) for name in ("recall@1_low", "recall@", "16", "map@r")] == [None] * 4
