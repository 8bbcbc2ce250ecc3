"""Deep metric learning: losses, heads, samplers, the training loop and the evaluator. Depends on torch, numpy and FAISS, on no service."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dml_core.trained import TrainedModel, load_model

__all__ = ["TrainedModel", "load_model"]


def __getattr__(name: str) -> Any:
    """Import `TrainedModel` and `load_model` on first use: torch takes seconds to import, and most of the package does not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'dml_core' has no attribute '{name}'")
    return getattr(import_module("dml_core.trained"), name)
