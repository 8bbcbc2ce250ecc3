"""Metrics of deep metric learning as pure functions of arrays. `evaluate` is imported on first use: reading settings needs no FAISS."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "evaluate":
        from dml_core.evaluation.evaluator import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
