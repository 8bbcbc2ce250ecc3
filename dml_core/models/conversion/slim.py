"""Converts TF-slim's Inception v1 (`inception_v1_2016_08_28`) to a state dict of the backbone `inception_v1`.

`read_slim_checkpoint.py` reads the checkpoint in an environment with TensorFlow; this module does not need it.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dml_core.errors import ConfigError, first_line
from dml_core.models.backbones.weights import StateDict

SCOPE = "InceptionV1/"
CLASSIFIERS = (f"{SCOPE}Logits/", f"{SCOPE}AuxLogits/")
# Suffix of a state dict's key -> suffix of slim's variable.
VARIABLES = {
    "conv.weight": "weights",
    "norm.bias": "BatchNorm/beta",
    "norm.running_mean": "BatchNorm/moving_mean",
    "norm.running_var": "BatchNorm/moving_variance",
}
SCALE = "norm.weight"  # 1: slim's BatchNorm of this network has no gamma


def read_arrays(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the variables that `read_slim_checkpoint.py` wrote, by name.

    Raises:
        ConfigError: the file is missing, damaged, or not a NumPy archive.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except Exception as error:  # noqa: BLE001 - NumPy, zipfile and zlib raise a dozen kinds for damaged bytes
        raise ConfigError(f"{path} is not a NumPy archive as read_slim_checkpoint.py writes them ({first_line(error)})") from None


def state_dict_from_slim(variables: Mapping[str, NDArray[np.float32]], own: StateDict) -> StateDict:
    """Return the backbone's state dict from slim's variables; convolutions are transposed from HWIO to OIHW.

    Classifiers, optimiser variables and the global step are omitted. A variable that the backbone does not have (for example a BatchNorm's
    gamma) keeps its name.

    Args:
        variables: arrays by their names in the checkpoint, such as `InceptionV1/Conv2d_1a_7x7/weights` (7, 7, 3, 64).
        own: the backbone's own state, for its names and shapes.
    """
    keys = {slim_name(key): key for key in own if key.endswith(tuple(VARIABLES))}
    state = {key: torch.ones(value.shape, device="cpu") for key, value in own.items() if key.endswith(SCALE)}
    for name, array in variables.items():
        if name.startswith(SCOPE) and not name.startswith(CLASSIFIERS) and name.endswith((*VARIABLES.values(), "BatchNorm/gamma")):
            oihw = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array
            state[keys.get(name, name)] = torch.from_numpy(np.ascontiguousarray(oihw, dtype=np.float32))
    return state


def slim_name(key: str) -> str:
    """Return the checkpoint's name of a state dict key such as `Mixed_3b.Branch_0.Conv2d_0a_1x1.conv.weight`."""
    unit, kind, last = key.rsplit(".", 2)
    return f"{SCOPE}{unit.replace('.', '/')}/{VARIABLES[f'{kind}.{last}']}"
