"""Metrics shown in tables, and their order, shared by reports, MLflow's pages and the terminal. Light to import."""

from collections.abc import Iterable

SHOWN = ("map@r", "r_precision", "nmi")  # in addition to every Recall@K; the other metrics explain these
HEADLINES = ("recall@1", "map@r", "nmi")  # where space is limited


def recall_k(name: str) -> int | None:
    """Return the K of a metric named `recall@K`; None for any other metric."""
    k = name.removeprefix("recall@")
    return int(k) if k != name and k.isdigit() else None


def table_columns(names: Iterable[str]) -> list[str]:
    """Return the metrics shown in a table, in its order: every Recall@K, K rising, then SHOWN."""
    measured = set(names)
    recalls = sorted((k, name) for name in measured if (k := recall_k(name)) is not None)
    return [*(name for _, name in recalls), *(name for name in SHOWN if name in measured)]
