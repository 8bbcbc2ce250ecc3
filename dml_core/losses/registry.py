"""Registry of losses: name -> class, imported only when used, so that a run depends only on its own loss's file.

`pml:<ClassName>` is any loss of pytorch-metric-learning, with that class's options.
"""

from collections.abc import Mapping
from numbers import Integral
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from dml_core.config import unknown_name
from dml_core.errors import ConfigError
from dml_core.extras import require
from dml_core.overrides import parse_overridden

if TYPE_CHECKING:
    from dml_core.losses.contract import Loss, LossConfig  # these import torch

LOSSES: dict[str, str] = {
    "softmax": "dml_core.losses.softmax:Softmax",
    "normalised_softmax": "dml_core.losses.normalised_softmax:NormalisedSoftmax",
    "softtriple": "dml_core.losses.softtriple:SoftTriple",
    "hardtriple": "dml_core.losses.hardtriple:HardTriple",
    "heated_up_softmax": "dml_core.losses.heated_up_softmax:HeatedUpSoftmax",
    "discriminative": "dml_core.losses.discriminative:Discriminative",
    "tuplet_margin": "dml_core.losses.tuplet_margin:TupletMargin",
    "sgsl": "dml_core.losses.sgsl:SGSL",
    "triplet_semi_hard": "dml_core.losses.triplet_semi_hard:TripletSemiHard",
    "triplet_batch_hard": "dml_core.losses.triplet_batch_hard:TripletBatchHard",
    "triplet_global": "dml_core.losses.triplet_global:TripletGlobal",
    "contrastive": "dml_core.losses.contrastive:Contrastive",
    "proxy_nca": "dml_core.losses.proxy_nca:ProxyNCA",
    "center_loss": "dml_core.losses.center_loss:CenterLoss",
    "ring_loss": "dml_core.losses.ring_loss:RingLoss",
    "l2_constrained_softmax": "dml_core.losses.l2_constrained_softmax:L2ConstrainedSoftmax",
    "combined": "dml_core.losses.combined:Combined",
}
PML_PREFIX = "pml:"
PML_ADAPTER = "dml_core.losses.pml:PmlLoss"


def check_loss_name(name: str) -> None:
    """Reject an unknown loss name without importing anything.

    Raises:
        ConfigError: unknown loss; the message suggests the nearest name.
    """
    if name not in LOSSES and not name.startswith(PML_PREFIX):
        raise unknown_name("loss", name, [*LOSSES, f"{PML_PREFIX}<ClassName>"])


def loss_class(name: str) -> "type[Loss]":
    """Return the class of a loss.

    Raises:
        ConfigError: unknown loss; the message suggests the nearest name.
        MissingPackageError: the loss is one of pytorch-metric-learning, which is not installed.
    """
    check_loss_name(name)
    if name.startswith(PML_PREFIX):
        require("pytorch_metric_learning")
    return resolve_name(LOSSES.get(name, PML_ADAPTER))


def class_names() -> dict[str, str]:
    """Return class name -> name of each registered loss."""
    return {target.partition(":")[2]: name for name, target in LOSSES.items()}


def losses_with(attribute: str) -> str:
    """Return the names of the losses whose class sets an attribute of `contract.Loss`, for a message."""
    return ", ".join(name for name in LOSSES if getattr(loss_class(name), attribute))


def parse_loss_options(name: str, options: Mapping[str, Any], where: str = "loss") -> "LossConfig":
    """Return the named loss's options as its typed configuration; null gives an option's default where it cannot be null.

    Raises:
        ConfigError: unknown loss, unknown option, or an option outside its range.
    """
    if name.startswith(PML_PREFIX):
        options = {"target": name.removeprefix(PML_PREFIX), "options": _without_null(options)}
    return parse_overridden(loss_class(name).Config, f"{where} '{name}'", options)


def _without_null(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, at every depth, without those that are null: the library's default holds."""
    given = {name: value for name, value in options.items() if value is not None}
    return {name: _without_null(value) if isinstance(value, Mapping) else value for name, value in given.items()}


def build_loss(name: str, options: Mapping[str, Any], num_classes: int, embedding_dim: int) -> "Loss":
    """Build a loss for `num_classes` classes and embeddings of `embedding_dim` dimensions.

    Raises:
        ConfigError: unknown loss or option, a size below 1, or options incompatible with the sizes.
    """
    for size, value in {"num_classes": num_classes, "embedding_dim": embedding_dim}.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"loss '{name}': {size} must be a whole number from 1, found {value!r}")
    return loss_class(name)(parse_loss_options(name, options), int(num_classes), int(embedding_dim))


def loss_modules(name: str, options: Mapping[str, Any]) -> set[str]:
    """Return the modules of the named loss and of its terms, which are part of a training run's identity. Imports none of them.

    Terms that are not written as terms are left out; `parse_loss_options` refuses them.

    Raises:
        ConfigError: unknown loss, here or among the terms.
    """
    check_loss_name(name)
    modules = {LOSSES.get(name, PML_ADAPTER).partition(":")[0]}
    terms = options.get("terms") if name == "combined" else None
    for term in terms if isinstance(terms, list | tuple) else ():
        if isinstance(term, Mapping) and isinstance(term.get("name"), str):
            own = term.get("options")
            modules |= loss_modules(term["name"], own if isinstance(own, Mapping) else {})
    return modules
