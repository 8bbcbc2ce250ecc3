"""TF-slim's Inception v1 (`inception_v1_2016_08_28`): its variables as a state dict of the backbone `inception_v1`.

The checkpoint itself is read by `read_slim_checkpoint.py`, in an environment with TensorFlow; this module needs none.
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
# The end of a state's name here, and of the variable that it is read from.
VARIABLES = {
    "conv.weight": "weights",
    "norm.bias": "BatchNorm/beta",
    "norm.running_mean": "BatchNorm/moving_mean",
    "norm.running_var": "BatchNorm/moving_variance",
}
SCALE = "norm.weight"  # 1: slim's BatchNorm of this network has no gamma


def read_arrays(path: Path) -> dict[str, NDArray[np.float32]]:
    """The variables that `read_slim_checkpoint.py` wrote, by name.

    Raises:
        ConfigError: there is no such file, it is damaged, or it is no NumPy archive.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is not a NumPy archive as read_slim_checkpoint.py writes them ({str(error).splitlines()[0]})") from None


def state_dict_from_slim(variables: Mapping[str, NDArray[np.float32]], source: str) -> dict[str, Tensor]:
    """The backbone's state of slim's variables; convolutions go from HWIO to OIHW.

    Classifiers, optimisers' variables and the global step are left out.

    Args:
        variables: arrays by the checkpoint's names, as `InceptionV1/Conv2d_1a_7x7/weights` (7, 7, 3, 64).
        source: the file, as an error names it.

    Raises:
        ConfigError: variables are missing, of another shape, or of another network (a BatchNorm with gamma, say).
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
    """The checkpoint's name of a state, as `Mixed_3b.Branch_0.Conv2d_0a_1x1.conv.weight`."""
    unit, kind, last = key.rsplit(".", 2)
    return f"{SCOPE}{unit.replace('.', '/')}/{VARIABLES[f'{kind}.{last}']}"


def _tensor(array: NDArray[np.float32]) -> Tensor:
    laid_out = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array
    return torch.from_numpy(np.ascontiguousarray(laid_out, dtype=np.float32))
