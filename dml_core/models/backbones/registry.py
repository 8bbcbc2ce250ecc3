"""Registry of backbones: name -> class, imported only when used, so that a run depends only on its own family's file."""

from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from dml_core.config import unknown_name
from dml_core.extras import require
from dml_core.models.backbones.config import BackboneConfig

if TYPE_CHECKING:
    from torch import nn

    from dml_core.data.views.transform_config import Scaling

TIMM_PREFIX = "timm:"
TIMM_ADAPTER = "dml_core.models.backbones.timm_model:TimmModel"
BACKBONES: dict[str, str] = {
    "small_cnn": "dml_core.models.backbones.small:SmallCNN",
    "lenet": "dml_core.models.backbones.small:LeNet",
    "lenet_released": "dml_core.models.backbones.small:ReleasedLeNet",
    "five_layer_cnn": "dml_core.models.backbones.small:FiveLayerCNN",
    "resnet18": "dml_core.models.backbones.resnet:ResNet",
    "resnet34": "dml_core.models.backbones.resnet:ResNet",
    "resnet50": "dml_core.models.backbones.resnet:ResNet",
    "resnet101": "dml_core.models.backbones.resnet:ResNet",
    "googlenet": "dml_core.models.backbones.googlenet:GoogLeNet",
    "googlenet_caffe": "dml_core.models.backbones.googlenet_caffe:GoogLeNetCaffe",
    "inception_v1": "dml_core.models.backbones.inception_v1:InceptionV1",
    "vgg16": "dml_core.models.backbones.vgg:VGG16",
    "bn_inception": "dml_core.models.backbones.bn_inception:BNInception",
}
# Pixel scaling with which each network's published weights were trained.
TRAINED_WITH: "dict[str, Scaling]" = {
    "resnet18": "rgb-imagenet",
    "resnet34": "rgb-imagenet",
    "resnet50": "rgb-imagenet",
    "resnet101": "rgb-imagenet",
    "googlenet": "minus-one-one",
    "googlenet_caffe": "bgr-bvlc",
    "inception_v1": "minus-one-one",
    "vgg16": "rgb-imagenet",
    "bn_inception": "bgr-caffe",
}


def backbone_module(name: str) -> str:
    """Return the module of a backbone, which is part of a training run's identity.

    Raises:
        ConfigError: unknown backbone; the message suggests the nearest name.
    """
    return _builder(name).partition(":")[0]


def unnamed_weights(config: BackboneConfig) -> str | None:
    """Return the SHA-256 of the file that a network starts from if neither the settings nor a published hash tell which file it is.

    It is part of a training's identity: another file of that name is another start. None also if the file is not on this machine.
    """
    from dml_core.files import file_sha256
    from dml_core.models.backbones.published import PUBLISHED

    if config.weights == "imagenet":
        file = PUBLISHED.get(config.name)
        return None if file is None or file.sha256 is not None else file.kept_sha256
    path = Path(config.weights)
    return file_sha256(path) if config.weights_sha256 is None and config.weights != "none" and path.is_file() else None


def build_backbone(config: BackboneConfig) -> "nn.Module":
    """Build the configured network with its attribute `num_features`. Published weights come from the weights folder (`published`).

    Raises:
        ConfigError: unknown name, or weights that are missing, damaged or incompatible.
        MissingPackageError: the backbone is one of timm, which is not installed.
    """
    if config.name.startswith(TIMM_PREFIX):
        require("timm")
    builder = resolve_name(_builder(config.name))
    if config.weights == "imagenet":
        from dml_core.models.backbones.published import PUBLISHED, fetch_published  # a reopened network needs none

        if config.name in PUBLISHED:
            config = config.model_copy(update={"weights": str(fetch_published(config.name))})
    return builder(config)


@cache
def backbone_shapes(config: BackboneConfig) -> "nn.Module":
    """Return the configured network on torch's device "meta": sizes without values, at no cost of memory. Each is built once.

    Raises:
        ConfigError: as `build_backbone`, but for the weights.
    """
    import torch

    with torch.device("meta"):
        return build_backbone(config.model_copy(update={"weights": "none", "weights_sha256": None})).eval()


def _builder(name: str) -> str:
    if name.startswith(TIMM_PREFIX):
        return TIMM_ADAPTER
    if name not in BACKBONES:
        raise unknown_name("backbone", name, [*BACKBONES, f"{TIMM_PREFIX}<model>"])
    return BACKBONES[name]
