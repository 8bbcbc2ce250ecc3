"""Backbones by name: images (N, 3, H, W) in, feature maps (N, F, h, w) out.

`small_cnn` is the CPU-size network of the embedded comparison. It normalises by groups of channels, not by batch, so that it gives the
same features whatever the number of workers without any communication. ResNets are torchvision's. Weights are `none`, `imagenet`
(torchvision's IMAGENET1K_V1, the ones that the papers' ResNets start from) or the path of a state dict; nothing is silently random.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torchvision
from pydantic import Field
from torch import Tensor, nn

from dml_core.config import Config, unknown_name
from dml_core.errors import ConfigError


class BackboneConfig(Config):
    """Which network, and what it starts from.

    Attributes:
        name: a key of `BACKBONES`.
        weights: "none" (random, seeded), "imagenet", or a path of a state dict saved by torch.
        width: channels of the first layer of `small_cnn`; other backbones have their published widths.
    """

    name: str
    weights: str = "none"
    width: int = Field(default=32, ge=8, multiple_of=8)


class SmallCNN(nn.Module):
    """Four 3x3 convolution blocks; the first three halve the resolution, each doubles the channels up to 4 x `width`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        channels = [3, width, 2 * width, 4 * width, 4 * width]
        blocks: list[nn.Module] = []
        for block, (before, after) in enumerate(pairwise(channels)):
            blocks += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.GroupNorm(8, after), nn.ReLU(inplace=True)]
            blocks += [nn.MaxPool2d(2, ceil_mode=True)] if block < 3 else []
        self.blocks = nn.Sequential(*blocks)
        self.num_features = channels[-1]

    def forward(self, images: Tensor) -> Tensor:
        """Feature maps (N, 4 * width, ceil(H / 8), ceil(W / 8)) of images (N, 3, H, W)."""
        maps: Tensor = self.blocks(images)
        return maps


class ResNetFeatures(nn.Module):
    """A torchvision ResNet without its pooling and classifier; parameter names are torchvision's."""

    def __init__(self, resnet: torchvision.models.ResNet) -> None:
        super().__init__()
        self.num_features = resnet.fc.in_features
        self.resnet = resnet
        self.resnet.fc = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Feature maps (N, 512 or 2048, H / 32, W / 32) of images (N, 3, H, W)."""
        net = self.resnet
        maps: Tensor = net.maxpool(net.relu(net.bn1(net.conv1(images))))
        for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
            maps = layer(maps)
        return maps


def _resnet(depth: int) -> Callable[[BackboneConfig], nn.Module]:
    def build(config: BackboneConfig) -> nn.Module:
        resnet = getattr(torchvision.models, f"resnet{depth}")(weights=None)
        if config.weights != "none":
            load_weights(resnet, _state_dict(config.weights, f"ResNet{depth}_Weights"), config.weights)
        return ResNetFeatures(resnet)

    return build


def _small_cnn(config: BackboneConfig) -> nn.Module:
    if config.weights == "imagenet":
        raise ConfigError("backbone 'small_cnn' has no ImageNet weights; set weights: none or a file")
    network = SmallCNN(config.width)
    if config.weights != "none":
        load_weights(network, _state_dict(config.weights, ""), config.weights)
    return network


BACKBONES: dict[str, Callable[[BackboneConfig], nn.Module]] = {
    "small_cnn": _small_cnn,
    "resnet18": _resnet(18),
    "resnet50": _resnet(50),
}


def build_backbone(config: BackboneConfig) -> nn.Module:
    """The configured network with its attribute `num_features`.

    Raises:
        ConfigError: unknown name, or weights that are missing or do not fit.
    """
    if config.name not in BACKBONES:
        raise unknown_name("backbone", config.name, list(BACKBONES))
    return BACKBONES[config.name](config)


def load_weights(network: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load `state` into `network`, strictly in names and shapes; only BatchNorm's batch counters may be absent.

    Raises:
        ConfigError: names or shapes differ; the message counts them and names the first of each kind.
    """
    own = network.state_dict()
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in own]
    shapes = [
        f"{key} {tuple(state[key].shape)} for {tuple(own[key].shape)}" for key in own if key in state and state[key].shape != own[key].shape
    ]
    if missing or unexpected or shapes:
        found = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}
        said = "; ".join(
            f"{len(keys)} {kind} ({', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''})" for kind, keys in found.items() if keys
        )
        raise ConfigError(f"weights '{source}' do not fit the backbone: {said}")
    network.load_state_dict(own | state)


def _state_dict(weights: str, torchvision_weights: str) -> dict[str, Tensor]:
    """The state dict of a file, or torchvision's ImageNet one."""
    if weights == "imagenet":
        return _download_imagenet(torchvision_weights)
    path = Path(weights)
    if not path.is_file():
        raise ConfigError(f"backbone weights '{weights}': no such file (weights is none, imagenet, or a file)")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch.load raises whatever the bytes lead its unpickler to
        raise ConfigError(f"backbone weights '{weights}' are not a state dict saved by torch: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"backbone weights '{weights}' are not a state dict (a mapping of names to tensors)")
    return state


def _download_imagenet(torchvision_weights: str) -> dict[str, Tensor]:
    weights = getattr(torchvision.models, torchvision_weights).IMAGENET1K_V1
    try:
        state: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"ImageNet weights cannot be downloaded from {weights.url} ({error}); download them by hand and set weights: <file>"
        ) from None
    return state
