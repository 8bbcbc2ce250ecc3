"""A pretended GPU: tensors that say that they are on the `meta` device, whose values the CPU computes.

Code that asks for its tensors' device takes the path of a GPU and ends with numbers, which can be compared with the CPU's. As on a GPU, an
operation on tensors of both devices is an error, and so is `.numpy()` without a copy to the CPU. (torch needs a driver to say `cuda`.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.watching import META

# Indices and scalars may be on the CPU, and these copy between devices.
MAY_MIX = ("_to_copy", "copy_", "index.Tensor", "index_put", "lift_fresh")


class OnGpu(Tensor):
    """A tensor on the pretended GPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGpu":
        """Wrap the tensor that has the values."""
        found: OnGpu = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=META
        )
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Compute on the CPU."""
        return _compute(function, arguments, keywords or {})


class _Factories(TorchDispatchMode):
    """Makes new tensors, too, on the pretended GPU if they are to be there."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return _compute(function, arguments, keywords or {})


def _compute(function: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
    name = str(function).removeprefix("aten.")
    tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
    on_gpu = any(isinstance(leaf, OnGpu) for leaf in tensors)
    if on_gpu and not name.startswith(MAY_MIX) and any(leaf.dim() and not isinstance(leaf, OnGpu) for leaf in tensors):
        raise RuntimeError(f"{name}: tensors on the GPU and on the CPU")
    target = keywords.get("device")
    if target is not None:
        keywords = {**keywords, "device": torch.device("cpu")}
        on_gpu = torch.device(target) == META
    elif name.startswith("copy_"):
        on_gpu = isinstance(arguments[0], OnGpu)
    wrapped = {id(leaf.inner): leaf for leaf in tensors if isinstance(leaf, OnGpu)}  # in-place operations return their argument
    inner_arguments, inner_keywords = tree_map(lambda leaf: leaf.inner if isinstance(leaf, OnGpu) else leaf, (arguments, keywords))
    found = function(*inner_arguments, **inner_keywords)
    if not on_gpu:
        return found
    return tree_map(lambda leaf: wrapped[id(leaf)] if id(leaf) in wrapped else OnGpu(leaf) if isinstance(leaf, Tensor) else leaf, found)


@contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """Compute on a pretended GPU, without gradients, within the context; yield its device."""
    with _Factories(), torch.no_grad():
        yield META
