"""Published weights that this machine keeps, checked before a run starts from them: torch's hub checks a file once, when it comes.

It stands apart from `weights.py`, which is a part of every trained system's identity: looking at a file changes no result.
"""

import hashlib
import re
from pathlib import Path

from dml_core.errors import ConfigError
from dml_core.models.backbones.config import BackboneConfig

_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.\w+$")  # how torch's hub and torchvision name what they publish


def check_kept(config: BackboneConfig) -> None:
    """Compare the file of a backbone's ImageNet weights, where it is here already, with the beginning of its SHA-256, which its name has.

    timm's networks are not looked at: their files are kept by another library, and hold nothing but tensors.

    Raises:
        ConfigError: it is damaged, or another file.
    """
    path = None if config.weights != "imagenet" or config.name.startswith("timm:") else kept_file(config.name)
    if path is None or not path.is_file():
        return
    named = _HASH_IN_NAME.search(path.name)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if named is not None and not found.startswith(named[1]):
        raise ConfigError(f"{path}: the kept ImageNet weights are damaged (SHA-256 {found[:12]}); remove the file, a run fetches it again")


def kept_file(backbone: str) -> Path | None:
    """Where torch's hub keeps a backbone's ImageNet weights; None for one that has none."""
    import torch
    import torchvision

    from dml_core.models.backbones.bn_inception import IMAGENET_ADDRESS

    if backbone == "bn_inception":
        address = IMAGENET_ADDRESS
    elif backbone in torchvision.models.list_models():
        address = torchvision.models.get_model_weights(backbone)["IMAGENET1K_V1"].url
    else:
        return None
    return Path(torch.hub.get_dir()) / "checkpoints" / address.rpartition("/")[2]
