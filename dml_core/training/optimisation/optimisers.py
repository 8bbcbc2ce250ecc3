"""Optimisers with separate groups for the backbone, the head (with a learned pooling) and the loss's own parameters (centres)."""

import math
from typing import Any

import torch
from torch import nn

from dml_core.errors import ConfigError
from dml_core.training.optimisation.config import GroupConfig, OptimiserConfig
from dml_core.training.parallel.workers import TrainingSystem


def build_optimiser(config: OptimiserConfig, system: TrainingSystem) -> torch.optim.Optimizer:
    """Build the optimiser over the trainable parameters; each group stores its base rate as `base_learning_rate`.

    Parameters without decay form a separate group named `<group> without decay`.

    Raises:
        ConfigError: there are no trainable parameters.
    """
    pooling, head = system.model.get_submodule("pooling"), system.model.get_submodule("head")
    modules = {"backbone": system.model.get_submodule("backbone"), "head": nn.ModuleList([pooling, head]), "loss": system.loss}
    groups = [group for name, module in modules.items() for group in _groups(config, name, module)]
    if not groups:
        raise ConfigError("nothing to train: neither the model nor the loss has a trainable parameter")
    if config.name == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, fused=config.fused)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, eps=config.eps, fused=config.fused)
    adam = TensorFlowAdam if config.eps_before_bias_correction else torch.optim.Adam
    return adam(groups, eps=config.eps, fused=config.fused)


class TensorFlowAdam(torch.optim.Adam):
    """Adam of TensorFlow and PyTorch 1.1: lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps), today's with eps / sqrt(1 - b2^t)."""

    _num_done: int | None = None

    def step(self, closure: Any = None) -> Any:
        """Step all parameters, as torch does. The step count is read only once from their state, which may be on a GPU."""
        if self._num_done is None:
            self._num_done = max((int(state["step"]) for state in self.state.values()), default=0)
        self._num_done += 1
        for group in self.param_groups:
            group["eps"] = self.defaults["eps"] / math.sqrt(1 - group["betas"][1] ** self._num_done)
        return super().step(closure)


def _groups(config: OptimiserConfig, name: str, module: nn.Module) -> list[dict[str, Any]]:
    """Return torch's parameter groups of one module, with and without decay; empty groups are omitted."""
    own = config.groups.get(name, GroupConfig())  # type: ignore[call-overload]
    rate = config.learning_rate if own.learning_rate is None else own.learning_rate
    decay = config.weight_decay if own.weight_decay is None else own.weight_decay
    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for key, parameter in module.named_parameters():
        if parameter.requires_grad:
            split[_decays(config, key, parameter)].append(parameter)
    common = {"lr": rate, "base_learning_rate": rate}
    decayed = {"params": split[True], "name": name, "weight_decay": decay, **common}
    free = {"params": split[False], "name": f"{name} without decay", "weight_decay": 0.0, **common}
    return [group for group in (decayed, free) if group["params"]]


def _decays(config: OptimiserConfig, key: str, parameter: nn.Parameter) -> bool:
    if config.without_decay == "biases":
        return key.rpartition(".")[2] != "bias"
    return config.without_decay == "none" or parameter.dim() > 1


def set_learning_rates(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's rate to its base rate times `factor`."""
    for group in optimiser.param_groups:
        group["lr"] = group["base_learning_rate"] * factor
