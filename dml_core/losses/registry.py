"""Names of the losses. A name leads to a module and a class, imported only when it is used: a run depends on its own loss's file alone."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from dml_core.config import parse, unknown_name
from dml_core.losses.contract import Loss, LossConfig

LOSSES: dict[str, str] = {
    "softmax": "dml_core.losses.softmax:Softmax",
    "normalised_softmax": "dml_core.losses.normalised_softmax:NormalisedSoftmax",
    "softtriple": "dml_core.losses.softtriple:SoftTriple",
    "hardtriple": "dml_core.losses.hardtriple:HardTriple",
}


def loss_class(name: str) -> type[Loss]:
    """The class behind a loss's name.

    Raises:
        ConfigError: no such loss; the nearest name is given.
    """
    if name not in LOSSES:
        raise unknown_name("loss", name, list(LOSSES))
    module_name, class_name = LOSSES[name].split(":")
    found: type[Loss] = getattr(import_module(module_name), class_name)
    return found


def parse_loss_options(name: str, options: Mapping[str, Any], where: str = "loss") -> LossConfig:
    """Options of the named loss as its typed configuration.

    Raises:
        ConfigError: unknown loss, unknown option, or an option outside its range.
    """
    return parse(loss_class(name).Config, options, f"{where} '{name}'")


def build_loss(name: str, options: Mapping[str, Any], num_classes: int, embedding_dim: int) -> Loss:
    """Build a loss for `num_classes` classes and embeddings of `embedding_dim` dimensions.

    Raises:
        ConfigError: unknown loss or option, or options that do not fit the classes or the embedding size.
    """
    return loss_class(name)(parse_loss_options(name, options), num_classes, embedding_dim)
