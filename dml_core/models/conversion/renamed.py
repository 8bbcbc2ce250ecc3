"""Renames a state dict whose tensors have the order and shapes of a timm model's under other names, as copies of its code have."""

import re
from pathlib import Path

import torch

from dml_core.errors import ConfigError
from dml_core.files import file_sha256
from dml_core.models.backbones.registry import TIMM_PREFIX
from dml_core.models.backbones.timm_model import published_config
from dml_core.models.backbones.weights import StateDict, read_state_dict

HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.[a-z]+$")  # as torch's hub names files
COUNTER = "num_batches_tracked"  # of BatchNorm; not in files older than PyTorch 0.4.1, and not needed


def read_tensors(path: Path) -> StateDict:
    """Return the tensors of a file, as `read_state_dict` does, after comparing its hash with the one in its name (`NAME-57934424.pth`).

    Raises:
        ConfigError: the file is missing, damaged, or has no tensors, or another hash.
    """
    named = HASH_IN_NAME.search(path.name)
    if named and path.is_file() and not (actual := file_sha256(path)).startswith(named[1]):
        raise ConfigError(f"{path} is damaged: its SHA-256 is {actual}, by its name it begins with {named[1]}")
    return read_state_dict(path, str(path))


def timm_state(backbone: str) -> StateDict:
    """Return the names and shapes of a timm model with its classifier, as tensors without values.

    Args:
        backbone: `timm:<model>`.

    Raises:
        ConfigError: not a timm model.
    """
    import timm

    if not backbone.startswith(TIMM_PREFIX):
        raise ConfigError(f"--backbone {backbone}: only timm's models are renamed; write {TIMM_PREFIX}<model>")
    name = backbone.removeprefix(TIMM_PREFIX)
    published_config(name)  # refuses an unknown model
    with torch.device("meta"):
        return dict(timm.create_model(name).state_dict())


def renamed(state: StateDict, own: StateDict, source: str) -> StateDict:
    """Return the tensors of `state` under the names of `own`, paired by their order.

    Two tensors are paired only if their shapes and the last parts of their names (`weight`, `running_mean`) are equal.

    Args:
        state: the file's tensors, in its order.
        own: the model's, with the classifier if the file has one.
        source: the file, for messages.

    Raises:
        ConfigError: the numbers of tensors differ, or two do not fit; the message names the first two.
    """
    if not any(name.endswith(COUNTER) for name in state):
        own = {name: value for name, value in own.items() if not name.endswith(COUNTER)}
    if len(state) != len(own):
        raise ConfigError(f"{source} has {len(state)} tensors, the network {len(own)}: it is of another network")
    for number, ((theirs, value), (ours, expected)) in enumerate(zip(state.items(), own.items(), strict=True), start=1):
        if value.shape != expected.shape or theirs.rpartition(".")[2] != ours.rpartition(".")[2]:
            pair = f"{theirs} {tuple(value.shape)} in the file, {ours} {tuple(expected.shape)} in the network"
            raise ConfigError(f"{source}: tensor {number} of {len(own)} does not fit: {pair}; it is of another network")
    return dict(zip(own, state.values(), strict=True))
