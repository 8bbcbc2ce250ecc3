"""Initial weights of a backbone: state dicts by name, file or address, loaded strictly; weights never silently stay random.

A download is stored in torch's hub folder under its SHA-256, which is verified at every use. http and https are supported here; other
modules add further schemes to `DOWNLOADERS` (`tasks.storage` adds s3).
"""

import hashlib
import shutil
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dml_core.config import unknown_name
from dml_core.errors import ConfigError
from dml_core.models.backbones.config import BackboneConfig

StateDict = dict[str, Tensor]
DOWNLOAD_TIMEOUT_SECONDS = 60


def start_from(
    network: nn.Module, config: BackboneConfig, imagenet: Callable[[], StateDict] | None, left_out: tuple[str, ...] = ()
) -> None:
    """Load the configured weights into `network`; "none" keeps its initial weights.

    Args:
        network: network whose names and shapes the weights must match.
        config: selects the weights.
        imagenet: returns the published state dict; None if none is published.
        left_out: prefixes of names to skip, such as those of a published file's classifiers.

    Raises:
        ConfigError: the weights are missing, damaged or incompatible.
    """
    if config.weights == "none":
        return
    if config.weights != "imagenet":
        state = _read_state_dict(_local_file(config.weights, config.weights_sha256), config.weights)
    elif imagenet is not None:
        state = imagenet()
    else:
        raise ConfigError(f"backbone '{config.name}' has no ImageNet weights; set weights: none, a file or an address")
    load_weights(network, {key: value for key, value in state.items() if not key.startswith(left_out)}, config.weights)


def load_weights(network: nn.Module, state: StateDict, source: str) -> None:
    """Load `state` into `network`, with strict names and shapes.

    Only BatchNorm's batch counters may be missing, and a vector may be saved as a one-row matrix (BN-Inception's older file).

    Raises:
        ConfigError: names or shapes differ; the message counts them and names the first five of each kind.
    """
    own = network.state_dict()
    state = {key: value[0] if key in own and value.shape == (1, *own[key].shape) else value for key, value in state.items()}
    problems = {
        "missing": [key for key in own if key not in state and not key.endswith("num_batches_tracked")],
        "unexpected": [key for key in state if key not in own],
        "wrong shape": [
            f"{key} {tuple(state[key].shape)} for {tuple(value.shape)}"
            for key, value in own.items()
            if key in state and state[key].shape != value.shape
        ],
    }
    if any(problems.values()):
        said = "; ".join(f"{len(keys)} {kind} ({_first_few(keys)})" for kind, keys in problems.items() if keys)
        raise ConfigError(f"weights '{source}' do not fit the backbone: {said}")
    network.load_state_dict(own | state)


def published_weights(download: Callable[[], StateDict], address: str) -> StateDict:
    """Return the state dict from a library's own download.

    Raises:
        ConfigError: the download failed; the message explains what to do without internet access.
    """
    try:
        return download()
    except Exception as error:  # noqa: BLE001 - urllib, http and hub clients raise a dozen kinds, and all mean the same here
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"ImageNet weights cannot be downloaded from {address} ({reason}); download them by hand and set weights: <file>"
        ) from None


def torchvision_imagenet(name: str) -> Callable[[], StateDict]:
    """Return a function that loads torchvision's IMAGENET1K_V1 weights of `name`, from which the papers' networks start."""
    import torchvision  # takes seconds to import, and this project's own networks do not need it

    weights = torchvision.models.get_model_weights(name)["IMAGENET1K_V1"]
    return lambda: published_weights(lambda: weights.get_state_dict(progress=False, check_hash=True), weights.url)


def _first_few(keys: list[str]) -> str:
    return ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")


def _read_state_dict(path: Path, source: str) -> StateDict:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch.load raises whatever the bytes lead its unpickler to
        raise ConfigError(f"backbone weights '{source}' are not a state dict saved by torch: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"backbone weights '{source}' are not a state dict (a mapping of names to tensors)")
    return state


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
    """Download an address once; move the file into place only when it is complete and its hash matches."""
    scheme, _, rest = address.partition("://")
    path = Path(torch.hub.get_dir()) / "checkpoints" / f"{sha256}-{Path(rest).name}"
    if not path.exists():
        if scheme not in DOWNLOADERS:
            raise unknown_name("kind of weights address", scheme, list(DOWNLOADERS))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder) / "part"
            DOWNLOADERS[scheme](address, part)
            _check_hash(part, sha256, address)
            part.replace(path)
    else:
        _check_hash(path, sha256, address)
    return path


def _fetch_http(address: str, path: Path) -> None:
    try:
        with urllib.request.urlopen(address, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except OSError as error:
        raise ConfigError(f"backbone weights '{address}' cannot be downloaded ({error}); check it or set weights: <file>") from None


DOWNLOADERS: dict[str, Callable[[str, Path], None]] = {"http": _fetch_http, "https": _fetch_http}


def _check_hash(path: Path, sha256: str, source: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ConfigError(f"backbone weights '{source}' have SHA-256 {found}, weights_sha256 is {sha256}: they are damaged or others")
