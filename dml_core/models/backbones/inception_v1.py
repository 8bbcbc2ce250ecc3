"""TF-slim's Inception v1, heated-up softmax's network: GoogLeNet with BatchNorm and TensorFlow's SAME padding, with slim's scope names.

It differs from torchvision's GoogLeNet in the padding of strided layers, which is asymmetric for an even side, and in BatchNorm, which
has no scale. Source: tensorflow/models, research/slim/nets/inception_v1.py. The converted weights expect pixels from -1
to 1 (`scaling: minus-one-one`).
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.inception_widths import WIDTHS, Widths
from dml_core.models.backbones.weights import start_from

# slim counts a stage's modules from b: letter a is the pooling before them.
BLOCKS = {f"Mixed_{name[0]}{chr(ord(name[1]) + 1)}": widths for name, widths in WIDTHS.items()}
POOLED_BEFORE = {"Mixed_4b": 3, "Mixed_5b": 2}  # side of the pooling window


class InceptionV1(nn.Module):
    """Stem and nine inception modules; every convolution is followed by BatchNorm without scale and ReLU."""

    num_features = 1024

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.add_module("Conv2d_1a_7x7", Unit(3, 64, 7, stride=2))
        self.add_module("Conv2d_2b_1x1", Unit(64, 64, 1))
        self.add_module("Conv2d_2c_3x3", Unit(64, 192, 3))
        for name, widths in BLOCKS.items():
            # Mixed_5b's convolution is published under another name
            self.add_module(name, Block(widths, five="Conv2d_0a_3x3" if name == "Mixed_5b" else "Conv2d_0b_3x3"))
        start_from(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """Feature maps (N, 1024, H / 32, W / 32), rounded up, of images (N, 3, H, W)."""
        maps = halved(self.get_submodule("Conv2d_1a_7x7")(images), 3)
        maps = halved(self.get_submodule("Conv2d_2c_3x3")(self.get_submodule("Conv2d_2b_1x1")(maps)), 3)
        for name in BLOCKS:
            if name in POOLED_BEFORE:
                maps = halved(maps, POOLED_BEFORE[name])
            maps = self.get_submodule(name)(maps)
        return maps


class Block(nn.Module):
    """One inception module; `five` is the name of the second convolution in the third branch."""

    def __init__(self, widths: Widths, five: str) -> None:
        super().__init__()
        entering = widths.in_channels
        one = {"Conv2d_0a_1x1": Unit(entering, widths.one, 1)}
        three = {"Conv2d_0a_1x1": Unit(entering, widths.three_reduce, 1), "Conv2d_0b_3x3": Unit(widths.three_reduce, widths.three, 3)}
        third = {"Conv2d_0a_1x1": Unit(entering, widths.five_reduce, 1), five: Unit(widths.five_reduce, widths.five, 3)}
        pooled = {"MaxPool_0a_3x3": nn.MaxPool2d(3, stride=1, padding=1), "Conv2d_0b_1x1": Unit(entering, widths.projection, 1)}
        branches = (nn.Sequential(OrderedDict(layers)) for layers in (one, three, third, pooled))
        self.Branch_0, self.Branch_1, self.Branch_2, self.Branch_3 = branches

    def forward(self, maps: Tensor) -> Tensor:
        """Map (N, C, h, w) to (N, D, h, w)."""
        return torch.cat([self.Branch_0(maps), self.Branch_1(maps), self.Branch_2(maps), self.Branch_3(maps)], dim=1)


class Unit(nn.Module):
    """Convolution with SAME padding and no bias, BatchNorm that learns only its shift, ReLU.

    Args:
        in_channels, out_channels: channels of the convolution.
        size: side of its window, odd.
        stride: 1 or 2.
    """

    def __init__(self, in_channels: int, out_channels: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.size, self.stride = size, stride
        self.conv = nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2 if stride == 1 else 0, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, eps=0.001)
        self.norm.weight.requires_grad_(False)  # stays 1: slim has no gamma

    def forward(self, maps: Tensor) -> Tensor:
        """Map (N, in_channels, h, w) to (N, out_channels, h / stride, w / stride), rounded up."""
        padded = maps if self.stride == 1 else same_padded(maps, self.size, self.stride)
        return self.norm(self.conv(padded)).relu_()


def halved(maps: Tensor, size: int) -> Tensor:
    """Return TensorFlow's SAME max pooling, stride 2, windows of `size`; zero padding changes no maximum, as `maps` are rectified."""
    return functional.max_pool2d(same_padded(maps, size, 2), size, stride=2)


def same_padded(maps: Tensor, size: int, stride: int) -> Tensor:
    """Return `maps` (N, C, h, w) with TensorFlow's SAME zero padding, enough for ceil(h / stride) windows.

    If the number of zeros is odd, the extra zero is at the bottom or right.

    Source: TensorFlow's API reference, tf.nn, "Notes on padding".
    """
    border: list[int] = []
    for side in (maps.shape[3], maps.shape[2]):  # functional.pad starts with the last axis
        num_windows = -(-side // stride)
        missing = max((num_windows - 1) * stride + size - side, 0)
        border += [missing // 2, missing - missing // 2]
    return functional.pad(maps, border)
