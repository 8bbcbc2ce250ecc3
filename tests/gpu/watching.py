"""A dispatch mode that finds operations for which the CPU would wait for a GPU, on torch's `meta` device, which stands for the GPU.

Tensors of the meta device have shapes and no values. Code that asks for its tensors' device takes the path of a GPU, forward and backward.
Operations that read a value raise there (`nonzero`, `.item()`, selection by mask, `unique`); others would only wait, and are counted.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
WAIT = (
    "_local_scalar_dense",
    "_unique",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "repeat_interleave.Tensor",
    "unique",
)


class Watch(TorchDispatchMode):
    """Counts the operations on tensors of the meta device that wait, and copies to and from it that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Note the operation, then run it."""
        keywords = keywords or {}
        name = str(function).removeprefix("aten.")
        tensors = [part for part in torch.utils._pytree.tree_leaves((arguments, keywords)) if isinstance(part, Tensor)]
        on_gpu = any(part.device == META for part in tensors)
        if on_gpu and name.startswith(WAIT):
            self.waits[name.partition(".")[0]] += 1
        if on_gpu and name.startswith("index.Tensor") and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in arguments[1]):
            self.waits["selection by mask"] += 1
        found = function(*arguments, **keywords)
        if name.startswith("_to_copy"):
            self._copied(arguments[0], found, keywords.get("non_blocking", False))
        if name.startswith("copy_"):
            self._copied(arguments[1], arguments[0], arguments[2] if len(arguments) > 2 else keywords.get("non_blocking", False))
        return found

    def _copied(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        if source.device != target.device and not (non_blocking and target.device == META):
            self.waits[f"copy from {source.device.type} to {target.device.type}"] += 1


def waits_of(step: Callable[[], object]) -> dict[str, int]:
    """Return the waiting operations of a step and how often each runs.

    Raises:
        NotImplementedError, RuntimeError: an operation reads a value of the meta device, or mixes devices.
    """
    with Watch() as watch:
        step()
    return dict(watch.waits)


class Constants(TorchDispatchMode):
    """Counts tensors made from Python's numbers, which a GPU has to wait for. The meta device makes them unseen: run a step on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Count the operation, then run it."""
        self.number += str(function).startswith("aten.lift_fresh")
        return function(*arguments, **(keywords or {}))
