"""Initial weights of a backbone: state dicts by name, file or address, loaded strictly; weights never silently stay random.

A download is stored in torch's hub folder under its SHA-256, which is verified at every use. http and https are supported here; other
modules add further schemes to `DOWNLOADERS` (`tasks.storage` adds s3).
"""

import re
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import torch
from torch import Tensor, nn

from dml_core.config import check_known
from dml_core.errors import ConfigError, first_line
from dml_core.files import file_sha256
from dml_core.models.backbones.config import BackboneConfig

StateDict = dict[str, Tensor]
DOWNLOAD_TIMEOUT_SECONDS = 60
NUM_NAMES_SHOWN = 5
MAX_NAME = 100  # characters of an address in the name of its stored download


def start_from(
    network: nn.Module, config: BackboneConfig, left_out: tuple[str, ...] = (), imagenet: Callable[[], StateDict] | None = None
) -> None:
    """Load the configured weights into `network`; "none" keeps its initial weights.

    Args:
        network: network whose names and shapes the weights must match.
        config: selects the weights; `registry.build_backbone` has replaced "imagenet" by the published file, if there is one.
        left_out: prefixes of names to skip, such as those of a published file's classifiers.
        imagenet: returns the state dict of a library that keeps its own published weights.

    Raises:
        ConfigError: the weights are missing, damaged or incompatible.
    """
    if config.weights == "none":
        return
    if config.weights != "imagenet":
        state = read_state_dict(_local_file(config.weights, config.weights_sha256), f"backbone weights '{_shown(config.weights)}'")
    elif imagenet is not None:
        state = imagenet()
    else:
        raise ConfigError(f"backbone '{config.name}' has no ImageNet weights; set weights: none, a file or an address")
    own = network.state_dict()
    state = {key: value for key, value in state.items() if not key.startswith(left_out)}
    # BN-Inception's older file has vectors as matrices of one row.
    state = {key: value[0] if key in own and value.shape == (1, *own[key].shape) else value for key, value in state.items()}
    check_fit(own, state, _shown(config.weights))
    network.load_state_dict(own | state)


def check_fit(own: StateDict, state: StateDict, source: str) -> None:
    """Compare names and shapes of weights with a network's own. Only BatchNorm's batch counters may be missing.

    Raises:
        ConfigError: names or shapes differ; the message counts them and names the first five of each kind.
    """
    problems = {
        "missing": [key for key in own if key not in state and not key.endswith("num_batches_tracked")],
        "unexpected": [key for key in state if key not in own],
        "wrong shape": [
            f"{key} {tuple(state[key].shape)} for {tuple(value.shape)}"
            for key, value in own.items()
            if key in state and state[key].shape != value.shape
        ],
    }
    differences = [
        f"{len(keys)} {kind} ({', '.join(keys[:NUM_NAMES_SHOWN])}{', ...' * (len(keys) > NUM_NAMES_SHOWN)})"
        for kind, keys in problems.items()
        if keys
    ]
    if differences:
        raise ConfigError(f"weights '{source}' do not fit the backbone: {'; '.join(differences)}")


def read_state_dict(path: Path, source: str) -> StateDict:
    """Return the tensors of a state dict saved by torch, in its order; of a checkpoint, those of its entry `state_dict`.

    Args:
        path: the file.
        source: beginning of errors.

    Raises:
        ConfigError: the file is missing, damaged, or has no such tensors.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file") from None
    except Exception as error:  # noqa: BLE001 - torch.load raises whatever the bytes lead its unpickler to
        raise ConfigError(f"{source}: not a state dict saved by torch ({first_line(error)})") from None
    if isinstance(state, dict):
        state = state.get("state_dict", state)
    if not isinstance(state, dict) or not state or not all(isinstance(name, str) and isinstance(state[name], Tensor) for name in state):
        raise ConfigError(f"{source}: not a state dict (a mapping of names to tensors)")
    return dict(state)


# ---------------------------------------------------------------- files and addresses


def _local_file(weights: str, sha256: str | None) -> Path:
    """Return the file itself or the stored download of an address, after verifying its hash."""
    if "://" in weights:
        assert sha256 is not None
        return _download(weights, sha256)
    path = Path(weights)
    if not path.is_file():
        raise ConfigError(f"backbone weights '{weights}': no such file (weights is none, imagenet, a file, or an address)")
    if sha256 is not None:
        _check_hash(path, sha256, weights)
    return path


def _download(address: str, sha256: str) -> Path:
    """Return the stored download of an address after verifying its hash; download it if it is not stored."""
    scheme, _, rest = address.partition("://")
    name = Path(re.split("[?#]", rest, maxsplit=1)[0]).name[-MAX_NAME:]  # without a presigned address's query
    path = Path(torch.hub.get_dir()) / "checkpoints" / f"{sha256}-{name}"
    if path.exists():
        _check_hash(path, sha256, address)
        return path
    check_known("kind of weights address", scheme, DOWNLOADERS)
    try:
        with downloaded(address, path.parent) as part:
            _check_hash(part, sha256, address)
            part.replace(path)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ConfigError(
            f"backbone weights '{_shown(address)}' cannot be stored in {path.parent} ({reason}); TORCH_HOME names another"
        ) from None
    return path


def _shown(weights: str) -> str:
    """Return a file's path, or an address without user and query, which may hold a password or sign it."""
    return re.sub(r"(?<=://)[^/@]*@|\?.*", "", weights) if "://" in weights else weights


@contextmanager
def downloaded(address: str, folder: Path) -> Iterator[Path]:
    """Yield a downloaded file in a temporary folder below `folder`; the caller verifies it and moves it into place."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        part = Path(temporary) / "part"
        DOWNLOADERS[address.partition("://")[0]](address, part)
        yield part


def _check_hash(path: Path, sha256: str, source: str) -> None:
    if (actual := file_sha256(path)) != sha256:
        raise ConfigError(
            f"backbone weights '{_shown(source)}' have SHA-256 {actual}, weights_sha256 is {sha256}: they are damaged or others"
        )


def _fetch_http(address: str, path: Path) -> None:
    try:
        with urllib.request.urlopen(address, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except (HTTPException, OSError, ValueError) as error:  # ValueError: not an address, such as one with an umlaut
        raise ConfigError(f"backbone weights '{_shown(address)}' cannot be downloaded ({error}); check it or set weights: <file>") from None


DOWNLOADERS: dict[str, Callable[[str, Path], None]] = {"http": _fetch_http, "https": _fetch_http}
