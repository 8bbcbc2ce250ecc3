"""The losses, one per file.

`from dml_core.losses import SoftTriple` gives the class for an ordinary PyTorch loop (`metric_loss.MetricLoss`), under the name of the
registered class. The training loop builds its losses by registered name (`registry.build_loss`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dml_core.losses.metric_loss import MetricLoss


def __getattr__(name: str) -> "type[MetricLoss]":
    """Return the class of a registered loss for an ordinary PyTorch loop, importing it on first use."""
    from dml_core.losses.registry import class_names

    if name not in class_names():
        from dml_core.config import nearest_hint

        raise AttributeError(f"module 'dml_core.losses' has no loss '{name}'{nearest_hint(name, class_names())}")
    from dml_core.losses.metric_loss import metric_loss_class

    return metric_loss_class(class_names()[name])


def __dir__() -> list[str]:
    from dml_core.losses.registry import class_names

    return sorted([*globals(), *class_names()])
