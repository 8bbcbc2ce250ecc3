"""A run whose loss's classes are spread over workers: what is told of it to DistributedDataParallel, and its checkpoints, which are whole.

Whatever leaves the loop has all classes, so that a checkpoint taken with four workers is gone on from by two or one, and whoever embeds
or scores knows of no shards. A function that makes something whole is called by all workers, and gives it to all: for a moment each holds
one tensor of all classes. Where nothing is spread, all leave what they are given as it is.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dml_core.errors import ConfigError
from dml_core.losses.contract import Loss
from dml_core.training.parallel import TrainingSystem


def check_shardable(name: str, loss: Loss, num_workers: int) -> None:
    """Refuse a loss whose classes cannot be spread over so many workers.

    Raises:
        ConfigError: the loss is not made for it, or there are fewer classes than workers.
    """
    if not loss.CLASS_DIMS:
        raise ConfigError(
            f"shard_classes: the classes of loss '{name}' cannot be spread over workers: remove shard_classes, or take softtriple, "
            "hardtriple, normalised_softmax, heated_up_softmax or sgsl"
        )
    if loss.num_classes < num_workers:
        raise ConfigError(
            f"shard_classes: {loss.num_classes} classes cannot be spread over {num_workers} workers: remove it, or lower scale.num_workers"
        )


def leave_to_their_worker(parallel: nn.Module, system: TrainingSystem) -> None:
    """Have DistributedDataParallel, when it wraps `parallel`, neither reduce nor compare what each worker has a part of."""
    spread = {id(system.loss.get_parameter(name)) for name in system.loss.sharded_dims}
    names = [name for name, parameter in parallel.named_parameters() if id(parameter) in spread]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parallel, names)  # type: ignore[no-untyped-call]


def whole_state(system: TrainingSystem) -> dict[str, Tensor]:
    """The system's state dictionary with all classes."""
    return _changed(system.state_dict(), system, _join(system))


def cut_state(whole: dict[str, Tensor], system: TrainingSystem) -> dict[str, Tensor]:
    """Of a state dictionary with all classes what this worker's system takes."""
    return _changed(dict(whole), system, _cut(system))


def whole_optimiser_state(optimiser: torch.optim.Optimizer, system: TrainingSystem) -> dict[str, Any]:
    """The optimiser's state dictionary, as if it had stepped all classes."""
    return _changed_optimiser(optimiser.state_dict(), optimiser, system, _join(system))


def cut_optimiser_state(whole: dict[str, Any], optimiser: torch.optim.Optimizer, system: TrainingSystem) -> dict[str, Any]:
    """Of an optimiser's state dictionary for all classes what this worker's takes."""
    return _changed_optimiser(whole, optimiser, system, _cut(system))


Change = Callable[[Tensor, int], Tensor]


def _join(system: TrainingSystem) -> Change:
    return lambda part, dim: part if system.loss.shard is None else system.loss.shard.join(part, dim)


def _cut(system: TrainingSystem) -> Change:
    return lambda whole, dim: whole if system.loss.shard is None else system.loss.shard.cut(whole, dim)


def _changed(state: dict[str, Tensor], system: TrainingSystem, change: Change) -> dict[str, Tensor]:
    for name, dim in system.loss.sharded_dims.items():
        state[f"loss.{name}"] = change(state[f"loss.{name}"], dim)
    return state


def _changed_optimiser(state: dict[str, Any], optimiser: torch.optim.Optimizer, system: TrainingSystem, change: Change) -> dict[str, Any]:
    """What an optimiser keeps of a parameter (moments, momentum) has its shape, except for scalars such as its number of steps."""
    dims = {id(system.loss.get_parameter(name)): dim for name, dim in system.loss.sharded_dims.items()}
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    kept: Mapping[int, dict[str, Any]] = state["state"]
    changed = {
        index: {
            name: change(value, dims[id(parameter)]) if _is_shaped_as(value, parameter) else value for name, value in kept[index].items()
        }
        for index, parameter in enumerate(parameters)
        if id(parameter) in dims and index in kept
    }
    return state | {"state": {**kept, **changed}}


def _is_shaped_as(value: Any, parameter: Tensor) -> bool:
    """By the number of dimensions: one of the two may have all classes and the other a part."""
    return isinstance(value, Tensor) and value.dim() == parameter.dim()
