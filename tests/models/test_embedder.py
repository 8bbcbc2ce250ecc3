"""The embedding network: state that a training step changes, and parameters that gradients reach."""

import pytest
import torch
from torch import nn

from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import BACKBONES
from dml_core.models.embedder import Embedder, ModelConfig
from dml_core.models.heads import HeadConfig
from dml_core.models.pooling import PoolingConfig

SIZE = {"bn_inception": 64, "googlenet": 64}


def embedder(name="resnet18", head=None, **options):
    torch.manual_seed(0)
    return Embedder(ModelConfig(backbone=BackboneConfig(name=name), head=head or HeadConfig(embedding_dim=8), **options), num_classes=4)


def step(model):
    """Return the names of the state that one training step changes."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()(torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    optimiser.step()
    return {key for key, value in model.state_dict().items() if not torch.equal(before[key], value)}


def kinds(keys):
    """Return which kinds of the backbone's BatchNorm state are among the keys."""
    norm = [key for key in keys if key.startswith("backbone") and (".bn" in key or "downsample.1" in key)]
    return {"statistics" if "running" in key or "num_batches" in key else "affine" for key in norm}


@pytest.mark.parametrize(("freeze", "expected"), [("none", {"statistics", "affine"}), ("statistics", {"affine"}), ("all", set())])
def test_freezing_batchnorm_by_what_a_step_changes(freeze, expected):
    changed = step(embedder(freeze_batchnorm=freeze))
    assert kinds(changed) == expected
    assert {"backbone.conv1.weight", "head.linear.weight"} <= changed


def test_batchnorm_without_a_trained_scale_trains_its_shift_and_keeps_its_statistics_moving():
    changed = step(embedder(freeze_batchnorm="scale"))
    assert {"backbone.bn1.bias", "backbone.bn1.running_mean"} <= changed
    assert "backbone.bn1.weight" not in changed


@pytest.mark.parametrize(("momentum", "taken"), [(None, 0.1), (0.05, 0.05)])
def test_running_statistics_take_up_their_share_of_a_batch(momentum, taken):
    """From 0 they become momentum times the batch's mean; the head's BatchNorm uses the same momentum."""
    model = embedder(batchnorm_momentum=momentum, head=HeadConfig(kind="bn", embedding_dim=8))
    images = torch.randn(4, 3, 64, 64)
    model.train()(images)
    torch.testing.assert_close(model.backbone.bn1.running_mean, taken * model.backbone.conv1(images).mean(dim=(0, 2, 3)))
    assert model.head.norm.momentum == 0.05


def test_only_the_backbones_batchnorm_is_frozen():
    changed = step(embedder(freeze_batchnorm="all", head=HeadConfig(kind="bn", embedding_dim=8)))
    assert {"head.norm.running_mean", "head.norm.bias"} <= changed


def test_a_frozen_network_gives_in_training_what_it_gives_in_evaluation():
    model = embedder(freeze_batchnorm="statistics")
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model.train()(images), model.eval()(images))


@pytest.mark.parametrize("name", [name for name in BACKBONES if name not in ("resnet34", "resnet101")])  # more of the same layers
def test_gradients_reach_every_parameter(name):
    model = embedder(name, pooling=PoolingConfig(kind="average"))
    # Half of a ReLU's inputs are negative: with several images no unit is 0 for all of them.
    model.train()(torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    without = {key for key, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()}
    scales = {key for key, _ in model.named_parameters() if key.endswith("norm.weight")}  # slim's BatchNorm has no trained scale
    assert without == (scales if name == "inception_v1" else set())


def test_gradients_stop_at_what_does_not_train():
    model = embedder(freeze_batchnorm="all", head=HeadConfig(kind="bn_neck", embedding_dim=8), pooling=PoolingConfig(kind="gem"))
    model.train()(torch.randn(4, 3, 64, 64)).square().sum().backward()
    reached = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
    norms = {key for key, module in model.backbone.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert "backbone.conv1.weight" in reached
    assert reached.isdisjoint({f"backbone.{key}.{kind}" for key in norms for kind in ("weight", "bias")})
    assert reached.isdisjoint({"pooling.power", "head.layers.1.weight", "head.layers.1.bias"})


@pytest.mark.parametrize("name", ["small_cnn", "resnet18", "lenet"])
def test_how_maps_lie_in_memory_changes_rounding_and_nothing_else(name):
    images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    found = {}
    for memory_format, layout in (("channels_last", torch.channels_last), ("contiguous", torch.contiguous_format)):
        model = embedder(name, memory_format=memory_format).double()
        seen = []
        first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        first.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        output = model(images.double())
        output.square().mean().backward()
        assert seen[0].is_contiguous(memory_format=layout)
        found[memory_format] = [output.detach(), *(parameter.grad for parameter in model.parameters())]
    torch.testing.assert_close(found["channels_last"], found["contiguous"], rtol=1e-8, atol=1e-10)
