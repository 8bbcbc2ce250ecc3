"""BN-Inception (Ioffe & Szegedy, 2015), SoftTriple's network, with the shapes and layer names of the public Caffe port.

The published weights expect BGR pixels from 0 to 255 minus (104, 117, 128): `scaling: bgr-caffe`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.weights import start_from


class Block(NamedTuple):
    """Channels of one inception block; 0 omits a branch, and a block without a 1x1 branch halves the resolution."""

    in_channels: int
    one: int
    three_reduce: int
    three: int
    double_reduce: int
    double: int
    projection: int


BLOCKS = {
    "3a": Block(192, 64, 64, 64, 64, 96, 32),
    "3b": Block(256, 64, 64, 96, 64, 96, 64),
    "3c": Block(320, 0, 128, 160, 64, 96, 0),
    "4a": Block(576, 224, 64, 96, 96, 128, 128),
    "4b": Block(576, 192, 96, 128, 96, 128, 128),
    "4c": Block(576, 160, 128, 160, 128, 160, 128),
    "4d": Block(608, 96, 128, 192, 160, 192, 128),
    "4e": Block(608, 0, 128, 192, 192, 256, 0),
    "5a": Block(1056, 352, 192, 320, 160, 224, 128),
    "5b": Block(1024, 352, 192, 320, 192, 224, 128),
}


class BNInception(nn.Module):
    """Stem and ten inception blocks; every convolution `<stem>` has a bias and is followed by `<stem>_bn` and ReLU."""

    num_features = 1024

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, 7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64, 1)
        self._add("conv2_3x3", 64, 192, 3)
        for name, block in BLOCKS.items():
            self._add_block(f"inception_{name}", block)
        self.halve = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.average = nn.AvgPool2d(3, stride=1, padding=1, ceil_mode=True)
        self.maximum = nn.MaxPool2d(3, stride=1, padding=1)
        start_from(self, config, left_out=("last_linear.",))

    def forward(self, images: Tensor) -> Tensor:
        """Feature maps (N, 1024, H / 32, W / 32) of images (N, 3, H, W)."""
        maps: Tensor = self.halve(self._unit("conv1_7x7_s2", images))
        maps = self.halve(self._unit("conv2_3x3", self._unit("conv2_3x3_reduce", maps)))
        for name, block in BLOCKS.items():
            maps = self._block(name, block, maps)
        return maps

    def _block(self, name: str, block: Block, maps: Tensor) -> Tensor:
        stem = f"inception_{name}"
        three = self._unit(f"{stem}_3x3", self._unit(f"{stem}_3x3_reduce", maps))
        double = self._unit(f"{stem}_double_3x3_1", self._unit(f"{stem}_double_3x3_reduce", maps))
        double = self._unit(f"{stem}_double_3x3_2", double)
        if not block.one:
            return torch.cat([three, double, self.halve(maps)], dim=1)
        pooled = self.maximum(maps) if name == "5b" else self.average(maps)
        return torch.cat([self._unit(f"{stem}_1x1", maps), three, double, self._unit(f"{stem}_pool_proj", pooled)], dim=1)

    def _unit(self, stem: str, maps: Tensor) -> Tensor:
        return self.get_submodule(f"{stem}_bn")(self.get_submodule(stem)(maps)).relu_()

    def _add_block(self, stem: str, block: Block) -> None:
        stride = 1 if block.one else 2
        if block.one:
            self._add(f"{stem}_1x1", block.in_channels, block.one, 1)
        self._add(f"{stem}_3x3_reduce", block.in_channels, block.three_reduce, 1)
        self._add(f"{stem}_3x3", block.three_reduce, block.three, 3, stride)
        self._add(f"{stem}_double_3x3_reduce", block.in_channels, block.double_reduce, 1)
        self._add(f"{stem}_double_3x3_1", block.double_reduce, block.double, 3)
        self._add(f"{stem}_double_3x3_2", block.double, block.double, 3, stride)
        if block.projection:
            self._add(f"{stem}_pool_proj", block.in_channels, block.projection, 1)

    def _add(self, stem: str, in_channels: int, out_channels: int, size: int, stride: int = 1) -> None:
        self.add_module(stem, nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2))
        self.add_module(f"{stem}_bn", nn.BatchNorm2d(out_channels))
