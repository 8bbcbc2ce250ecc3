"""The evaluator's metrics: display name, kind, whether higher is better; and those that tables show. Light to import.

A new metric is computed in `retrieval/metrics.py`, `clustering.py` or `separability.py` and gets its line here; reports, MLflow's pages,
the terminal and the comparison of systems read this table.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple


class MetricInfo(NamedTuple):
    """Facts of a metric.

    Attributes:
        title: display name.
        family: "clustering" metrics need k-means.
        higher_is_better: True if the system with the highest value may be called the best.
        is_share_of_queries: the value is a share of the queries, whose spread over seeds has a floor.
    """

    title: str
    family: Literal["retrieval", "clustering", "separability", "measurement"]
    higher_is_better: bool = False
    is_share_of_queries: bool = False


METRICS = {
    "map@r": MetricInfo("MAP@R", "retrieval", higher_is_better=True),
    "r_precision": MetricInfo("R-precision", "retrieval", higher_is_better=True),
    "nmi": MetricInfo("NMI", "clustering", higher_is_better=True),
    "precision@1": MetricInfo("precision@1", "retrieval", higher_is_better=True, is_share_of_queries=True),
    "mrr": MetricInfo("MRR", "retrieval", higher_is_better=True),
    "recall@1_class_mean": MetricInfo("recall@1 class mean", "retrieval"),
    "nmi_geometric": MetricInfo("NMI (geometric)", "clustering", higher_is_better=True),
    "ami": MetricInfo("AMI", "clustering", higher_is_better=True),
    "f1": MetricInfo("F1", "clustering", higher_is_better=True),
    "csc": MetricInfo("CSC", "separability"),
    "csc_trace_between": MetricInfo("csc trace between", "separability"),
    "csc_trace_within": MetricInfo("csc trace within", "separability"),
    "intra_class_distance": MetricInfo("intra class distance", "separability"),
    "inter_class_distance": MetricInfo("inter class distance", "separability"),
}
TABLE_METRICS = ("map@r", "r_precision", "nmi")  # shown in every table, after every Recall@K; the other metrics explain these
HEADLINES = ("recall@1", "map@r", "nmi")  # shown also where space is limited


def recall_k(name: str) -> int | None:
    """Return the K of a metric named `recall@K`; None for any other metric."""
    match = re.fullmatch("recall@([1-9][0-9]{0,17})", name)
    return None if match is None else int(match[1])


def metric_info(name: str) -> MetricInfo:
    """Return a metric's facts; a metric that is not the evaluator's is a measurement, titled by its name."""
    if (k := recall_k(name)) is not None:
        return MetricInfo(f"R@{k}", "retrieval", higher_is_better=True, is_share_of_queries=True)
    return METRICS.get(name, MetricInfo(name.replace("_", " "), "measurement"))


def table_columns(names: Iterable[str]) -> list[str]:
    """Return the metrics shown in a table, in its order: every Recall@K, K rising, then TABLE_METRICS."""
    measured = set(names)
    recalls = sorted((k, name) for name in measured if (k := recall_k(name)) is not None)
    return [*(name for _, name in recalls), *(name for name in TABLE_METRICS if name in measured)]
