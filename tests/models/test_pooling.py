"""Pooling compared with hand calculations and limits."""

import pytest
import torch

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.models.pooling import PoolingConfig, build_pooling

MAPS = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[-1.0, -5.0], [0.0, 2.0]]]])  # 1 image, 2 channels, 2 x 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("average", [3.0, -1.0]),
        ("max", [6.0, 2.0]),
        ("average_max", [9.0, 1.0]),
        ("gem", [(252 / 4) ** (1 / 3), (8 / 4) ** (1 / 3)]),  # (1 + 8 + 27 + 216) / 4; negatives count as 0
    ],
)
def test_pooling_by_hand(kind, expected):
    torch.testing.assert_close(build_pooling(PoolingConfig(kind=kind))(MAPS), torch.tensor([expected]))


def test_gem_is_the_average_at_one_and_near_the_maximum_at_a_large_power():
    maps = torch.rand(2, 3, 4, 4, dtype=torch.float64) + 0.5
    average, largest = maps.mean(dim=(2, 3)), maps.amax(dim=(2, 3))
    torch.testing.assert_close(build_pooling(PoolingConfig(kind="gem", gem_power=1.0)).double()(maps), average)
    torch.testing.assert_close(build_pooling(PoolingConfig(kind="gem", gem_power=200.0)).double()(maps), largest, rtol=0.03, atol=0)


@pytest.mark.parametrize("power", [1.0, 3.0, 8.0, 30.0, 50.0])
def test_gem_in_float32_is_the_formula_in_float64_at_any_power(power: float):
    """Activations of a ReLU: from 0.001 to 100, and a channel that is 0 everywhere."""
    maps = 10 ** (torch.rand(4, 6, 5, 5, generator=torch.Generator().manual_seed(0)) * 5 - 3)
    maps[:, 0] = 0.0
    own = build_pooling(PoolingConfig(kind="gem", gem_power=power, learn_gem_power=True))
    x, exact = maps.clone().requires_grad_(), maps.double().requires_grad_()
    p = torch.tensor(power, dtype=torch.float64, requires_grad=True)
    pooled, expected = own(x), exact.clamp_min(1e-6).pow(p).mean(dim=(2, 3)).pow(1 / p)
    torch.testing.assert_close(pooled.double(), expected, rtol=1e-5, atol=0)
    pooled.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(own.power.grad.double(), p.grad, rtol=1e-4, atol=0)


@pytest.mark.parametrize("learn", [True, False])
def test_gem_power_is_learned_only_on_request(learn):
    pooling = build_pooling(PoolingConfig(kind="gem", learn_gem_power=learn))
    pooling(MAPS.clone().requires_grad_()).sum().backward()
    assert (pooling.power.grad is not None) == learn


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gem_stays_finite_where_half_precision_powers_would_not(dtype):
    pooled = build_pooling(PoolingConfig(kind="gem"))(torch.full((1, 1, 2, 2), 100.0, dtype=dtype))
    torch.testing.assert_close(pooled, torch.tensor([[100.0]]))


@pytest.mark.parametrize("option", [{"gem_power": 5.0}, {"learn_gem_power": True}])
def test_options_of_gem_are_refused_elsewhere(option):
    for kind in ("average", "max", "average_max"):
        with pytest.raises(ConfigError, match=f"^pooling: pooling kind '{kind}' does not read '{next(iter(option))}': remove it$"):
            parse(PoolingConfig, {"kind": kind, **option}, "pooling")
    assert parse(PoolingConfig, {"kind": "gem", **option}, "pooling")


def test_gem_s_published_options_may_stay_where_another_kind_overrides_it():
    assert parse(PoolingConfig, {"kind": "average", "gem_power": 3, "learn_gem_power": False}, "pooling") == PoolingConfig()


def test_unknown_pooling_is_refused():
    with pytest.raises(ConfigError, match="kind"):
        parse(PoolingConfig, {"kind": "median"}, "pooling")
