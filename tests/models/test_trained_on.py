"""Images that published weights were trained on: the publishers' statements, and the scaling that gives the same values."""

import pytest
import timm
import torch
import torchvision
from timm.data import create_transform, resolve_data_config
from torchvision.transforms import functional

from dml_core.data.views.transform_config import TransformConfig
from dml_core.data.views.transforms import scale
from dml_core.errors import ConfigError
from dml_core.models.backbones.registry import BACKBONES, TRAINED_WITH
from dml_core.models.backbones.trained_on import TrainedOn, trained_on

EFFICIENTNET, VIT = "timm:tf_efficientnet_lite0", "timm:vit_small_patch16_224"


def test_every_backbone_with_published_weights_has_them() -> None:
    assert {name for name in BACKBONES if trained_on(name) is not None} == set(TRAINED_WITH)
    for name in TRAINED_WITH:
        images = trained_on(name)
        assert images is not None
        assert TransformConfig(scaling=images.scaling, crop_size=images.side, test_resize=images.resize, interpolation=images.interpolation)


def test_torchvisions_preset_is_ours() -> None:
    preset = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    images = trained_on("resnet18")
    assert images == TrainedOn(preset.crop_size[0], preset.resize_size[0], "bilinear", "rgb-imagenet")


@pytest.mark.parametrize("name", [EFFICIENTNET, VIT, "timm:resnet50", "timm:convnext_tiny", "timm:mobilenetv3_small_100"])
def test_a_timm_model_sees_the_pixels_of_timms_own_transform(name: str) -> None:
    images, published = trained_on(name), timm.get_pretrained_cfg(name.removeprefix("timm:"))
    assert images is not None
    assert published is not None
    transform = create_transform(**resolve_data_config({}, pretrained_cfg=published.to_dict()))
    colour = torch.tensor([200, 30, 90], dtype=torch.uint8)[:, None, None].expand(3, images.resize, images.resize)  # no resize changes it
    expected = transform(functional.to_pil_image(colour))
    assert expected.shape == (3, images.side, images.side)
    assert torch.allclose(scale(colour[:, : images.side, : images.side], images.scaling), expected, atol=1e-4)


def test_transformers_have_a_fixed_side_and_other_statistics_the_nearest_scaling() -> None:
    vit, clip, efficientnet = trained_on(VIT), trained_on("timm:vit_base_patch16_clip_224"), trained_on(EFFICIENTNET)
    assert vit is not None
    assert clip is not None
    assert efficientnet is not None
    assert (vit.has_fixed_side, efficientnet.has_fixed_side) == (True, False)
    assert (vit.scaling, clip.scaling) == ("minus-one-one", "rgb-imagenet")


def test_an_unknown_timm_model_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown timm model 'resnet19'; did you mean 'resnet1"):
        trained_on("timm:resnet19")
    with pytest.raises(ConfigError, match=r"unknown timm model 'resnet18\.a1_in2k'; did you mean 'resnet18\.a1_in1k'"):
        trained_on("timm:resnet18.a1_in2k")
