"""Deep metric learning: losses, heads, samplers, the training loop and the evaluator. Depends on torch, numpy and FAISS, on no service."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dml_core.data.views.batch_sampler import ClassBalancedSampler
    from dml_core.evaluation.config import EvaluationConfig
    from dml_core.evaluation.evaluator import evaluate
    from dml_core.trained import TrainedModel, load_model

__all__ = ["ClassBalancedSampler", "EvaluationConfig", "TrainedModel", "evaluate", "load_model"]

_MODULES = {
    "ClassBalancedSampler": "dml_core.data.views.batch_sampler",
    "EvaluationConfig": "dml_core.evaluation.config",
    "TrainedModel": "dml_core.trained",
    "evaluate": "dml_core.evaluation.evaluator",
    "load_model": "dml_core.trained",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: torch takes seconds to import, and most of the package does not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'dml_core' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
