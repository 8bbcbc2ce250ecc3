"""Optimisers with one group each for the backbone, the head (a learned pooling included) and the loss's own parameters (centres)."""

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from dml_core.config import Config
from dml_core.errors import ConfigError
from dml_core.training.parallel import TrainingSystem

GroupName = Literal["backbone", "head", "loss"]


class GroupConfig(Config):
    """What one group has of its own; what is not given is the optimiser's."""

    learning_rate: float | None = Field(default=None, gt=0)
    weight_decay: float | None = Field(default=None, ge=0)


class OptimiserConfig(Config):
    """An optimiser and its groups.

    Attributes:
        name: "sgd", "adam" or "adamw", torch's.
        learning_rate: base rate of every group that has none of its own.
        weight_decay: L2 coefficient, likewise.
        without_decay: parameters that no group decays: "biases" (SGSL's released code), or all of "one_dimension", which are biases and
            the scales of normalisations.
        momentum, nesterov: SGD's; `eps`: Adam's.
        groups: own settings of "backbone", "head" or "loss".
    """

    name: Literal["sgd", "adam", "adamw"] = "adam"
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    without_decay: Literal["none", "biases", "one_dimension"] = "none"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    eps: float = Field(default=1e-8, gt=0)
    groups: dict[GroupName, GroupConfig] = {}

    @model_validator(mode="after")
    def _fits(self) -> "OptimiserConfig":
        if self.name != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(f"momentum and nesterov belong to sgd, not to {self.name}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


def build_optimiser(config: OptimiserConfig, system: TrainingSystem) -> torch.optim.Optimizer:
    """The optimiser over what trains; each group keeps its base rate as `base_learning_rate`.

    Parameters without decay form a group of their own beside their fellows, named `<group> without decay`.

    Raises:
        ConfigError: nothing trains.
    """
    pooling, head = system.model.get_submodule("pooling"), system.model.get_submodule("head")
    modules = {"backbone": system.model.get_submodule("backbone"), "head": nn.ModuleList([pooling, head]), "loss": system.loss}
    groups = [group for name, module in modules.items() for group in _groups(config, name, module)]
    if not groups:
        raise ConfigError("nothing to train: neither the model nor the loss has a trainable parameter")
    if config.name == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov)
    adam = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return adam(groups, eps=config.eps)


def _groups(config: OptimiserConfig, name: str, module: nn.Module) -> list[dict[str, Any]]:
    """torch's groups for one of ours: what decays, and what does not; empty ones are left out."""
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
    """Every group's rate = its base rate times `factor`."""
    for group in optimiser.param_groups:
        group["lr"] = group["base_learning_rate"] * factor
