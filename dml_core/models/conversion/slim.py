"""Converts TF-slim's Inception v1 (`inception_v1_2016_08_28`) to a state dict of the backbone `inception_v1`.

`read_slim_checkpoint.py` reads the checkpoint in an environment with TensorFlow; this module does not need it.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dml_core.errors import ConfigError
from dml_core.models.conversion.state_dict import check_fit, first_few, shapes_of

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
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is not a NumPy archive as read_slim_checkpoint.py writes them ({str(error).splitlines()[0]})") from None


def state_dict_from_slim(variables: Mapping[str, NDArray[np.float32]], source: str) -> dict[str, Tensor]:
    """Return the backbone's state dict from slim's variables; convolutions are transposed from HWIO to OIHW.

    Classifiers, optimiser variables and the global step are omitted.

    Args:
        variables: arrays by their names in the checkpoint, such as `InceptionV1/Conv2d_1a_7x7/weights` (7, 7, 3, 64).
        source: the file's name in error messages.

    Raises:
        ConfigError: variables are missing, have another shape, or are of another network (for example a BatchNorm with gamma).
    """
    expected = shapes_of("inception_v1")
    names = {key: slim_name(key) for key in expected if not key.endswith(SCALE)}
    endings = (*VARIABLES.values(), "BatchNorm/gamma")
    parts = {name for name in variables if name.startswith(SCOPE) and not name.startswith(CLASSIFIERS) and name.endswith(endings)}
    unexpected = sorted(parts - set(names.values()))
    if unexpected:
        raise ConfigError(f"{source} is not the published network: {len(unexpected)} unexpected: {first_few(unexpected)}")
    state = {key: _tensor(variables[name]) if name in variables else None for key, name in names.items()}
    check_fit(source, state, {key: expected[key] for key in names}, names)
    scales = {key: torch.ones(shape) for key, shape in expected.items() if key.endswith(SCALE)}
    return {key: tensor for key, tensor in (scales | state).items() if tensor is not None}


def slim_name(key: str) -> str:
    """Return the checkpoint's name of a state dict key such as `Mixed_3b.Branch_0.Conv2d_0a_1x1.conv.weight`."""
    unit, kind, last = key.rsplit(".", 2)
    return f"{SCOPE}{unit.replace('.', '/')}/{VARIABLES[f'{kind}.{last}']}"


def _tensor(array: NDArray[np.float32]) -> Tensor:
    laid_out = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array
    return torch.from_numpy(np.ascontiguousarray(laid_out, dtype=np.float32))
