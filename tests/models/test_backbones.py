"""Backbones: published parameter counts and names, shapes, and the effects of the options on the computation."""

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.models.backbones.bn_inception import BLOCKS
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import BACKBONES, TRAINED_WITH, build_backbone

# Published counts of the whole network and of its classifier: torchvision's model pages; bn_inception: 11,295,240.
PUBLISHED = {
    "resnet18": (11_689_512, 513_000),
    "resnet34": (21_797_672, 513_000),
    "resnet50": (25_557_032, 2_049_000),
    "resnet101": (44_549_160, 2_049_000),
    "googlenet": (6_624_904, 1_025_000),
    "googlenet_caffe": (6_998_552, 1_025_000),
    "inception_v1": (6_624_904, 1_025_000),  # as many as torchvision's, which was converted from it
    "vgg16": (138_357_544, 123_642_856),
    "bn_inception": (11_295_240, 1_025_000),
}
STRIDE = {"vgg16": 16, "small_cnn": 8, "five_layer_cnn": 16}
SMALL_RESNET = "resnet18"


def build(name, seed=0, **options):
    torch.manual_seed(seed)
    return build_backbone(BackboneConfig(name=name, **options)).eval()


def images(size=64):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", BACKBONES)
@torch.no_grad()
def test_maps_have_the_declared_features_and_the_published_stride(name):
    with torch.device("meta"):
        backbone = build(name)
        maps = backbone(torch.empty(2, 3, 64, 64))
    side = 1 if name.startswith("lenet") else 64 // STRIDE.get(name, 32)
    assert maps.shape == (2, backbone.num_features, side, side)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    whole, classifier = PUBLISHED[name]
    with torch.device("meta"):
        network = build(name)
    assert sum(parameter.numel() for parameter in network.parameters()) == whole - classifier


def test_every_network_with_published_weights_declares_their_scaling():
    assert set(TRAINED_WITH) == set(PUBLISHED)


@pytest.mark.parametrize("name", [SMALL_RESNET, "resnet50", "googlenet"])
@torch.no_grad()
def test_features_are_torchvisions(name):
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    torch.manual_seed(0)
    reference = torchvision.models.get_model(name, **options).eval()
    reference.fc = nn.Identity()
    torch.testing.assert_close(build(name)(images()).mean(dim=(2, 3)), reference(images()))


@torch.no_grad()
def test_vgg_is_torchvisions_up_to_the_last_relu():
    backbone = build("vgg16")
    layers = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["D"])
    layers.load_state_dict(backbone.features.state_dict())
    torch.testing.assert_close(functional.max_pool2d(backbone(images()), 2), layers(images()))


def test_bn_inception_has_the_69_published_layer_names_in_order():
    names = ["1x1", "3x3_reduce", "3x3", "double_3x3_reduce", "double_3x3_1", "double_3x3_2", "pool_proj"]
    stems = ["conv1_7x7_s2", "conv2_3x3_reduce", "conv2_3x3"]
    for block in ["3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"]:
        stems += [f"inception_{block}_{name}" for name in (names[1:-1] if block in ("3c", "4e") else names)]
    keys = ["weight", "bias", "_bn.weight", "_bn.bias", "_bn.running_mean", "_bn.running_var", "_bn.num_batches_tracked"]
    expected = [f"{stem}{key}" if key.startswith("_bn") else f"{stem}.{key}" for stem in stems for key in keys]
    assert len(stems) == 69
    assert list(build("bn_inception").state_dict()) == expected


def test_bn_inception_blocks_hand_their_channels_on():
    for before, after in zip(list(BLOCKS.values()), list(BLOCKS.values())[1:], strict=False):
        pooled = before.projection if before.one else before.in_channels
        assert before.one + before.three + before.double + pooled == after.in_channels


@torch.no_grad()
def test_bn_inception_last_block_by_hand():
    """Only block 5b has max pooling with stride 1 in its pooling branch."""
    net = build("bn_inception")
    entered = torch.randn(1, 1024, 7, 7)

    def unit(name, maps):
        conv, norm = net.get_submodule(f"inception_5b_{name}"), net.get_submodule(f"inception_5b_{name}_bn")
        out = functional.conv2d(maps, conv.weight, conv.bias, padding=conv.weight.shape[-1] // 2)
        return functional.relu(functional.batch_norm(out, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=1e-5))

    double = unit("double_3x3_2", unit("double_3x3_1", unit("double_3x3_reduce", entered)))
    branches = [unit("1x1", entered), unit("3x3", unit("3x3_reduce", entered)), double]
    expected = torch.cat([*branches, unit("pool_proj", functional.max_pool2d(entered, 3, 1, 1))], dim=1)
    torch.testing.assert_close(net._block("5b", BLOCKS["5b"], entered), expected)


@pytest.mark.parametrize("name", [SMALL_RESNET, "resnet50"])
@torch.no_grad()
def test_last_stride_one_doubles_the_map_and_keeps_the_weights(name):
    plain, wide = build(name), build(name, last_stride=1)
    assert wide(images()).shape[2:] == (4, 4)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), wide.state_dict().values(), strict=True))


@torch.no_grad()
def test_stem_pool_without_padding_gives_the_same_size():
    padded, ceil = build(SMALL_RESNET), build(SMALL_RESNET, stem_pool="ceil")
    assert ceil(images()).shape == padded(images()).shape
    assert not torch.allclose(ceil(images()), padded(images()))


def last_block_by_hand(block, maps, inner_relu):
    rectify = functional.relu if inner_relu else (lambda values: values)
    norms = [getattr(block, name) for name in ("bn1", "bn2") if hasattr(block, name)]
    convs = [getattr(block, name) for name in ("conv1", "conv2", "conv3") if hasattr(block, name)]
    out = maps
    for conv, norm in zip(convs[:-1], norms, strict=True):
        out = rectify(norm(conv(out)))
    return maps + convs[-1](out)


@torch.no_grad()
def test_the_released_lenet_by_hand():
    """TensorFlow's SAME padding at 28x28: 28, pooled 14, 14, pooled 7; 25 * 32 + 25 * 32 * 64 + 3136 * 500 weights and 596 biases."""
    net = build("lenet_released")
    assert sum(parameter.numel() for parameter in net.parameters()) == 25 * 32 + 25 * 32 * 64 + 7 * 7 * 64 * 500 + 32 + 64 + 500
    digits = torch.rand(2, 1, 28, 28)
    first = functional.max_pool2d(functional.relu(functional.conv2d(digits, net.conv1.weight, net.conv1.bias, padding=2)), 2)
    second = functional.max_pool2d(functional.relu(functional.conv2d(first, net.conv2.weight, net.conv2.bias, padding=2)), 2)
    expected = functional.relu(functional.linear(second.flatten(1), net.linear.weight, net.linear.bias))
    torch.testing.assert_close(net(digits.expand(-1, 3, -1, -1))[:, :, 0, 0], expected)


@pytest.mark.parametrize(("name", "num_norms"), [(SMALL_RESNET, 1), ("resnet50", 2)])
@torch.no_grad()
def test_rbr_takes_the_last_norm_and_relu_away(name, num_norms):
    maps = images()
    plain = build(name)
    entered = plain.layer3(plain.layer2(plain.layer1(plain.maxpool(plain.relu(plain.bn1(plain.conv1(maps)))))))
    for block in list(plain.layer4)[:-1]:
        entered = block(entered)
    assert plain(maps).min() >= 0
    for rbr in ("published", "released"):
        opened = build(name, rbr=rbr)
        features = opened(maps)
        assert features.min() < 0
        assert f"layer4.{len(plain.layer4) - 1}.bn{num_norms + 1}.weight" not in opened.state_dict()
        torch.testing.assert_close(features, last_block_by_hand(opened.layer4[-1], entered, inner_relu=rbr == "published"))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
@torch.no_grad()
def test_timm_models_give_maps_whatever_their_layout(name):
    backbone = build(f"timm:{name}")
    maps = backbone(images(160))
    assert maps.dim() == 4
    assert maps.shape[:2] == (2, backbone.num_features)


@torch.no_grad()
def test_a_transformers_patches_are_its_positions():
    backbone = build("timm:test_vit")
    tokens = backbone.model.forward_features(images(160))
    assert tokens.shape[1] == 100 + backbone.num_prefix_tokens  # patches of 16
    torch.testing.assert_close(backbone(images(160))[0, :, 3, 0], tokens[0, backbone.num_prefix_tokens + 3])


@pytest.mark.parametrize("name", ["pit_ti_224", "volo_d1_224", "coat_lite_tiny", "crossvit_9_240"])
def test_a_class_token_in_an_unknown_place_is_refused(name):
    with torch.device("meta"), pytest.raises(ConfigError, match=rf"'timm:{name}' does not declare where .* class token; choose another"):
        build(f"timm:{name}")


def test_features_that_are_no_map_are_refused():
    with torch.device("meta"), pytest.raises(ConfigError, match=r"'efficientvim_m1' returns several features \(list\)"):
        build("timm:efficientvim_m1")(torch.zeros(1, 3, 224, 224))


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "levit_128s", "coatnet_pico_rw_224", "gcvit_xxtiny", "maxvit_pico_rw_256"])
def test_images_of_a_size_that_a_transformer_does_not_take_are_refused(name):
    with torch.device("meta"), pytest.raises(ConfigError, match=rf"^timm's '{name}' does not take images of 48 x 48 pixels .*crop_size"):
        build(f"timm:{name}")(torch.zeros(1, 3, 48, 48))


@pytest.mark.parametrize(("side", "error"), [(160, RuntimeError("cuDNN error")), (48, torch.OutOfMemoryError("CUDA out of memory"))])
def test_a_failure_that_is_not_of_the_size_is_no_setting(monkeypatch, side, error):
    def failing(images):
        raise error

    backbone = build("timm:test_vit")
    monkeypatch.setattr(backbone.model, "forward_features", failing)
    with pytest.raises(type(error), match=str(error)):
        backbone(images(side))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "resnet_50"}, "did you mean 'resnet50'"),
        ({"name": "timm:test_resnett"}, "did you mean 'test_resnet'"),
        ({"name": "timm:resnet18.a1_in2k"}, "unknown timm model 'resnet18.a1_in2k'; did you mean 'resnet18.a1_in1k'"),
        ({"name": "googlenet", "last_stride": 1}, "does not read 'last_stride'"),
        ({"name": "small_cnn", "rbr": "published"}, "does not read 'rbr'"),
        ({"name": "resnet50", "width": 8}, "does not read 'width'"),
        ({"name": "small_cnn", "weights": "imagenet"}, "has no ImageNet weights"),
    ],
)
def test_what_does_not_fit_is_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        build_backbone(parse(BackboneConfig, values, "backbone"))
