"""Which metrics a table shows, and in which order: reports, MLflow's pages and the terminal ask here. Light to import."""

from collections.abc import Iterable

SHOWN = ("map@r", "r_precision", "nmi")  # beside every Recall@K; the other metrics explain these
HEADLINES = ("recall@1", "map@r", "nmi")  # where only a few have room


def recall_k(name: str) -> int | None:
    """The K of a metric called `recall@K`; None for any other metric."""
    k = name.removeprefix("recall@")
    return int(k) if k != name and k.isdigit() else None


def table_columns(names: Iterable[str]) -> list[str]:
    """Those of the metrics that a table shows, in its order: every Recall@K, K rising, then SHOWN."""
    measured = set(names)
    recalls = sorted((k, name) for name in measured if (k := recall_k(name)) is not None)
    return [*(name for _, name in recalls), *(name for name in SHOWN if name in measured)]
