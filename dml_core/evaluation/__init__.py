"""Metrics of the field as pure functions of arrays. `evaluate` is imported on first use, so that settings can be read without FAISS."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "evaluate":
        from dml_core.evaluation.evaluator import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
