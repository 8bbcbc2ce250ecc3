"""Deep metric learning: losses, heads, samplers, the training loop and the evaluator. Knows torch, numpy and FAISS, no service."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dml_core.trained import TrainedModel, load_model

__all__ = ["TrainedModel", "load_model"]


def __getattr__(name: str) -> Any:
    """What a notebook wants at once, imported when it is asked for: torch takes seconds, and most of the package needs none."""
    if name not in __all__:
        raise AttributeError(f"module 'dml_core' has no attribute '{name}'")
    return getattr(import_module("dml_core.trained"), name)
