"""Backbones by name: images (N, 3, H, W) in, feature maps (N, F, h, w) out. One file per family; weights as `weights.py` has them."""

from collections.abc import Callable

from torch import nn

from dml_core.config import unknown_name
from dml_core.models.backbones.bn_inception import BNInception
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.googlenet import GoogLeNet
from dml_core.models.backbones.resnet import ResNet
from dml_core.models.backbones.small import build_small
from dml_core.models.backbones.timm_model import PREFIX, TimmModel
from dml_core.models.backbones.vgg import VGG16

__all__ = ["BACKBONES", "TRAINED_WITH", "BackboneConfig", "build_backbone"]

BACKBONES: dict[str, Callable[[BackboneConfig], nn.Module]] = {
    "small_cnn": build_small,
    "lenet": build_small,
    "five_layer_cnn": build_small,
    "resnet18": ResNet,
    "resnet34": ResNet,
    "resnet50": ResNet,
    "resnet101": ResNet,
    "googlenet": GoogLeNet,
    "vgg16": VGG16,
    "bn_inception": BNInception,
}
# The scaling of pixels that each network's published weights were trained with.
TRAINED_WITH = {
    "resnet18": "rgb-imagenet",
    "resnet34": "rgb-imagenet",
    "resnet50": "rgb-imagenet",
    "resnet101": "rgb-imagenet",
    "googlenet": "minus-one-one",
    "vgg16": "rgb-imagenet",
    "bn_inception": "bgr-caffe",
}


def build_backbone(config: BackboneConfig) -> nn.Module:
    """The configured network with its attribute `num_features`.

    Raises:
        ConfigError: unknown name, or weights that are missing or do not fit.
    """
    if config.name.startswith(PREFIX):
        return TimmModel(config)
    if config.name not in BACKBONES:
        raise unknown_name("backbone", config.name, [*BACKBONES, f"{PREFIX}<model>"])
    return BACKBONES[config.name](config)
