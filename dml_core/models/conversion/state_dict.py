"""Checks a published file's arrays against a backbone's names and shapes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dml_core.errors import ConfigError
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import build_backbone


def shapes_of(backbone: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a backbone's state, without BatchNorm's batch counters."""
    with torch.device("meta"):
        state = build_backbone(BackboneConfig(name=backbone)).state_dict()
    return {key: tuple(value.shape) for key, value in state.items() if not key.endswith("num_batches_tracked")}


def check_fit(source: str, found: Mapping[str, Tensor | None], expected: Mapping[str, tuple[int, ...]], names: Mapping[str, str]) -> None:
    """Compare tensors with a backbone's names and shapes.

    Args:
        source: the file's name in error messages.
        found: tensors by the backbone's names; None if the file has no such array.
        expected: shapes by the backbone's names.
        names: the file's names by the backbone's names.

    Raises:
        ConfigError: some are missing or have another shape; the message counts them and names the first five of each.
    """
    missing = [names[key] for key in expected if found.get(key) is None]
    others = [
        f"{names[key]} {tuple(tensor.shape)} for {expected[key]}"
        for key, tensor in found.items()
        if tensor is not None and tuple(tensor.shape) != expected[key]
    ]
    problems = {"missing": missing, "of another shape (as this project lays them out)": others}
    if any(problems.values()):
        said = "; ".join(f"{len(keys)} {kind}: {first_few(keys)}" for kind, keys in problems.items() if keys)
        raise ConfigError(f"{source} is not the published network: {said}")


def first_few(names: list[str]) -> str:
    """Return the first five names, with an ellipsis if there are more."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
