"""Runs that shard the loss's classes over workers: settings for DistributedDataParallel, and checkpoints with all classes.

Everything outside the loop has all classes, so a checkpoint of four workers can be resumed by two or one, and embedding and scoring code
does not handle shards. All workers call a function that joins shards; rank 0 receives the result, on the CPU, and the others their own
part: each device holds one tensor of all classes at a time. Without shards, the functions return their input unchanged.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dml_core.errors import ConfigError
from dml_core.losses.contract import Loss
from dml_core.losses.registry import losses_with
from dml_core.training.parallel.workers import TrainingSystem, rank


def check_shardable(name: str, loss: Loss, num_workers: int) -> None:
    """Reject a loss whose classes cannot be sharded over `num_workers` workers.

    Raises:
        ConfigError: the loss does not support it, or there are fewer classes than workers.
    """
    if not loss.CLASS_DIMS:
        raise ConfigError(
            f"shard_classes: the classes of loss '{name}' cannot be spread over workers: remove shard_classes, or take one of "
            f"{losses_with('CLASS_DIMS')}"
        )
    if loss.num_classes < num_workers:
        raise ConfigError(
            f"shard_classes: {loss.num_classes} classes cannot be spread over {num_workers} workers: remove it, or lower scale.num_workers"
        )


def leave_to_their_worker(parallel: nn.Module, system: TrainingSystem) -> None:
    """Make DistributedDataParallel, when it wraps `parallel`, neither reduce nor compare sharded parameters."""
    spread = {id(system.loss.get_parameter(name)) for name in system.loss.sharded_dims}
    names = [name for name, parameter in parallel.named_parameters() if id(parameter) in spread]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parallel, names)  # type: ignore[no-untyped-call]


def whole_state(system: TrainingSystem) -> dict[str, Tensor]:
    """Return the system's state dictionary, on rank 0 with all classes."""
    state = system.state_dict()
    for name, dim in system.loss.sharded_dims.items():
        state[f"loss.{name}"] = _join(system, state[f"loss.{name}"], dim)
    return state


def whole_optimiser_state(optimiser: torch.optim.Optimizer, system: TrainingSystem) -> dict[str, Any]:
    """Return the optimiser's state dictionary, on rank 0 as if one optimiser had updated all classes."""
    state = optimiser.state_dict()
    dims = _dims_of_parameters(optimiser, system)
    parameters = _parameters(optimiser)
    joined = {
        index: {
            name: _join(system, value, dims[index]) if _is_shaped_as(value, parameters[index]) else value for name, value in own.items()
        }
        for index, own in state["state"].items()
        if index in dims
    }
    return state | {"state": {**state["state"], **joined}}


def own_part(system: TrainingSystem, optimiser: torch.optim.Optimizer) -> Callable[[tuple[Any, ...], Tensor], Tensor]:
    """Return a function that cuts this worker's part from a checkpoint's tensor, given its path of keys and the tensor of all classes."""
    by_name = {f"loss.{name}": dim for name, dim in system.loss.sharded_dims.items()}
    by_index = _dims_of_parameters(optimiser, system)
    parameters = _parameters(optimiser)

    def cut(path: tuple[Any, ...], whole: Tensor) -> Tensor:
        dim = None
        if path[0] in ("system", "averaged"):
            dim = by_name.get(path[1])
        elif path[:2] == ("optimiser", "state") and _is_shaped_as(whole, parameters[path[2]]):
            dim = by_index.get(path[2])
        return whole if dim is None or system.loss.shard is None else system.loss.shard.cut(whole, dim)

    return cut


def _join(system: TrainingSystem, part: Tensor, dim: int) -> Tensor:
    if system.loss.shard is None:
        return part
    whole = system.loss.shard.join(part, dim)
    return whole.cpu() if rank() == 0 else part


def _parameters(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order of their indices in the optimiser's state."""
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def _dims_of_parameters(optimiser: torch.optim.Optimizer, system: TrainingSystem) -> dict[int, int]:
    """Map index in the optimiser's state -> dimension of classes, for the sharded parameters."""
    dims = {id(system.loss.get_parameter(name)): dim for name, dim in system.loss.sharded_dims.items()}
    return {index: dims[id(parameter)] for index, parameter in enumerate(_parameters(optimiser)) if id(parameter) in dims}


def _is_shaped_as(value: Any, parameter: Tensor) -> bool:
    """Return whether an optimiser's value (moments, momentum; not a step counter) has as many dimensions as the parameter.

    The sizes differ if one has all classes and the other a shard.
    """
    return isinstance(value, Tensor) and value.dim() == parameter.dim()
