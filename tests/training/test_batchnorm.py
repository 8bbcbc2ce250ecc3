"""Synchronised BatchNorm equals torch's on a group of one process."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import nn

from dml_core.training.parallel import batchnorm
from dml_core.training.parallel.batchnorm import synchronise_batchnorm

CPU = torch.device("cpu")
LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def synchronised(group: None, monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces BatchNorm as for two workers, although the group has only this one."""
    monkeypatch.setattr(batchnorm, "world_size", lambda: 2)
    return lambda module, device=CPU: synchronise_batchnorm(copy.deepcopy(module), device)


OPTIONS = [{}, {"momentum": None}, {"momentum": 0.3, "eps": 0.1}, {"affine": False}, {"track_running_stats": False}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(6, 3), (5, 3, 4), (4, 3, 2, 5)])
def test_values_gradients_and_running_statistics_are_torch_s(synchronised, shape: tuple[int, ...], options: dict) -> None:
    random = torch.Generator().manual_seed(0)
    theirs = LAYERS[len(shape)](3, **options).double()
    for parameter in theirs.parameters():
        parameter.data = torch.rand(3, generator=random, dtype=torch.float64) + 0.5
    ours = synchronised(theirs)
    assert type(ours) is not type(theirs)
    for step in range(3):
        values, weights = (torch.randn(shape, generator=random, dtype=torch.float64) * (step + 1) + step for _ in range(2))
        outputs, gradients = [], []
        for layer in (ours, theirs):
            images = values.clone().requires_grad_()
            outputs.append(layer(images))
            gradients.append(torch.autograd.grad((outputs[-1] * weights).sum(), [images, *layer.parameters()]))
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*gradients)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(ours.eval()(values), theirs.eval()(values))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_returned_as_it_came(synchronised, half: torch.dtype) -> None:
    values = 100 + torch.randn(512, 3, generator=torch.Generator().manual_seed(0))
    layer = nn.BatchNorm1d(3)
    expected = copy.deepcopy(layer)(values.to(half).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = synchronised(layer)(values.to(half))
    assert found.dtype == half
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.01)


def test_every_batchnorm_inside_is_replaced_under_its_name(synchronised) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    found = synchronised(module)
    assert [type(layer).__name__ for layer in found.modules() if isinstance(layer, nn.BatchNorm1d)] == ["SyncedBatchNorm"]
    assert found.state_dict().keys() == module.state_dict().keys()


def test_layers_inside_a_batchnorm_are_applied_after_it(synchronised) -> None:
    """timm's EfficientNets have their activations inside; converted by torch, they lose them."""
    values = torch.randn((4, 3, 2, 5), generator=torch.Generator().manual_seed(0))
    layer = BatchNormAct2d(3, act_layer=nn.ReLU6, drop_layer=lambda: nn.Threshold(0.5, 0.1))
    ours, on_gpu = synchronised(layer), synchronised(layer, torch.device("cuda"))
    torch.testing.assert_close(ours(values), layer(values))
    for found in (ours, on_gpu):
        assert found.state_dict().keys() == layer.state_dict().keys()
        found.load_state_dict(layer.state_dict())
        torch.testing.assert_close(found.eval()(values), layer.eval()(values))


def test_values_of_another_shape_are_refused_as_torch_does(synchronised) -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        synchronised(nn.BatchNorm2d(3))(torch.zeros(2, 3))
