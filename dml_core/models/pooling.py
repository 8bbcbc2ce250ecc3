"""Pooling of a feature map to one vector: average, maximum, their sum, and GeM (Radenovic et al., 2018; SGSL's pooling).

Shapes: N images, C channels, H x W positions.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from dml_core.float32 import at_least_float32
from dml_core.models.config import PoolingConfig

CLAMP = 1e-6  # GeM's smallest activation, as in SGSL's released code: smaller and negative ones are clamped


def build_pooling(config: PoolingConfig) -> nn.Module:
    """Build a module from feature maps (N, C, H, W) to vectors (N, C)."""
    return GeM(config.gem_power, config.learn_gem_power) if config.kind == "gem" else Pooling(config.kind)


class Pooling(nn.Module):
    """Mean over the positions ("average"), their maximum ("max"), or the sum of both ("average_max")."""

    def __init__(self, kind: Literal["average", "max", "average_max"]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C)."""
        if self.kind == "average":
            return maps_NCHW.mean(dim=(2, 3))
        maximum_NC = maps_NCHW.amax(dim=(2, 3))
        return maximum_NC if self.kind == "max" else maps_NCHW.mean(dim=(2, 3)) + maximum_NC


class GeM(nn.Module):
    """Generalised mean: (mean of x^p)^(1/p) over the positions; p = 1 is the average, large p approaches the maximum."""

    def __init__(self, power: float, learn_power: bool) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(power), requires_grad=learn_power)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C) in float32 or better, divided by the maximum meanwhile: no power overflows, nor all to 0."""
        with torch.autocast(maps_NCHW.device.type, enabled=False):
            clamped = at_least_float32(maps_NCHW).clamp_min(CLAMP)
            maximum_NC11 = clamped.detach().amax(dim=(2, 3), keepdim=True)  # no gradient is lost: the mean of c x is c times that of x
            return (clamped / maximum_NC11).pow(self.power).mean(dim=(2, 3)).pow(1.0 / self.power) * maximum_NC11[:, :, 0, 0]
