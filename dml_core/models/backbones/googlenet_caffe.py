"""GoogLeNet without BatchNorm (Szegedy et al., CVPR 2015) as in Caffe's model zoo, with that model's layer names.

Its "five" branch has 5x5 convolutions, and two layers normalise over neighbouring channels, unlike torchvision's and TF-slim's networks.
Source: BVLC/caffe, models/bvlc_googlenet. The converted weights expect BGR pixels from 0 to 255 minus (104, 117, 123):
`scaling: bgr-bvlc`.
"""

import torch
from torch import Tensor, nn

from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.inception_widths import WIDTHS, Widths
from dml_core.models.backbones.weights import start_from

POOLED_BEFORE = {"3a", "4a", "5a"}


class GoogLeNetCaffe(nn.Module):
    """Stem and nine inception modules; every convolution has a bias and is followed by ReLU."""

    num_features = 1024

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.add_module("conv1/7x7_s2", nn.Conv2d(3, 64, 7, stride=2, padding=3))
        self._add("conv2/3x3_reduce", 64, 64, 1)
        self._add("conv2/3x3", 64, 192, 3)
        for name, widths in WIDTHS.items():
            self._add_block(f"inception_{name}", widths)
        self.halve = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.maximum = nn.MaxPool2d(3, stride=1, padding=1)
        self.normalise = nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=1.0)  # divides alpha by 5, as Caffe does
        start_from(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """Feature maps (N, 1024, H / 32, W / 32) of images (N, 3, H, W)."""
        maps: Tensor = self.normalise(self.halve(self._rectified("conv1/7x7_s2", images)))
        maps = self.normalise(self._rectified("conv2/3x3", self._rectified("conv2/3x3_reduce", maps)))
        for name in WIDTHS:
            if name in POOLED_BEFORE:
                maps = self.halve(maps)
            maps = self._block(f"inception_{name}", maps)
        return maps

    def _block(self, stem: str, maps: Tensor) -> Tensor:
        three = self._rectified(f"{stem}/3x3", self._rectified(f"{stem}/3x3_reduce", maps))
        five = self._rectified(f"{stem}/5x5", self._rectified(f"{stem}/5x5_reduce", maps))
        projected = self._rectified(f"{stem}/pool_proj", self.maximum(maps))
        return torch.cat([self._rectified(f"{stem}/1x1", maps), three, five, projected], dim=1)

    def _rectified(self, name: str, maps: Tensor) -> Tensor:
        return self.get_submodule(name)(maps).relu_()

    def _add_block(self, stem: str, widths: Widths) -> None:
        self._add(f"{stem}/1x1", widths.in_channels, widths.one, 1)
        self._add(f"{stem}/3x3_reduce", widths.in_channels, widths.three_reduce, 1)
        self._add(f"{stem}/3x3", widths.three_reduce, widths.three, 3)
        self._add(f"{stem}/5x5_reduce", widths.in_channels, widths.five_reduce, 1)
        self._add(f"{stem}/5x5", widths.five_reduce, widths.five, 5)
        self._add(f"{stem}/pool_proj", widths.in_channels, widths.projection, 1)

    def _add(self, name: str, in_channels: int, out_channels: int, size: int) -> None:
        self.add_module(name, nn.Conv2d(in_channels, out_channels, size, padding=size // 2))
