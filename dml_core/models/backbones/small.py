"""Networks for small images: `small_cnn` for comparisons and those of the papers' figures. None has published weights.

`small_cnn` uses group instead of batch normalisation, so that its features do not depend on the number of workers and need no
communication.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from dml_core.initial_weights import SLIM, start_as_tensorflow
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.weights import start_from


class SmallCNN(nn.Sequential):
    """Feature maps (N, 4 * width, ceil(H / 8), ceil(W / 8)) of images (N, 3, H, W).

    Four 3x3 convolution blocks; the first three halve the resolution, each doubles the channels up to 4 x `width`.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        channels = [3, config.width, 2 * config.width, 4 * config.width, 4 * config.width]
        blocks: list[nn.Module] = []
        for block, (before, after) in enumerate(pairwise(channels)):
            blocks += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.GroupNorm(8, after)]
            blocks += [nn.MaxPool2d(2, ceil_mode=True)] if block < 3 else []
            blocks += [nn.ReLU(inplace=True)]  # after the pooling: the same bits from a quarter of the values
        self.add_module("blocks", nn.Sequential(*blocks))
        self.num_features = channels[-1]
        start_from(self, config)


class LeNet(nn.Module):
    """LeNet's two convolutions, 20 and 50 channels of 5x5, each pooled by 2 (heated-up softmax, Figures 3 and 4).

    The head is LeNet's second-last layer (`linear`, in the figures with `embedding_dim: 2`); the last layer is in the loss. The paper does
    not state which LeNet it means: assumed Caffe's for MNIST. `lenet_released` is the one of its released code.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.pool = nn.MaxPool2d(2)
        self.grid = nn.AdaptiveAvgPool2d(4)  # 28x28 images have 4x4 maps: the identity for them
        self.num_features = 50 * 4 * 4
        start_from(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """All positions as features, (N, 800, 1, 1), of images (N, 3, H, W)."""
        maps: Tensor = self.grid(self.pool(self.conv2(self.pool(self.conv1(images)))))
        return maps.flatten(1)[:, :, None, None]


class ReleasedLeNet(nn.Module):
    """LeNet of heated-up softmax's released `nets/lenet.py`: 5x5 convolutions of 32 and 64 channels, then a layer of 500, all with ReLU.

    Convolutions keep the size and are pooled by 2; initial weights are TensorFlow's (He et al., normal), biases 0. The single input channel
    is the mean of the image's three, which are equal for digits.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.pool = nn.MaxPool2d(2)
        self.grid = nn.AdaptiveAvgPool2d(7)  # 28x28 images have 7x7 maps: the identity for them
        self.linear = nn.Linear(64 * 7 * 7, 500)
        self.num_features = 500
        for layer in (self.conv1, self.conv2, self.linear):
            start_as_tensorflow(layer, SLIM)
        start_from(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """Outputs of the last layer, (N, 500, 1, 1), for images (N, 3, H, W)."""
        grey = images.mean(dim=1, keepdim=True)
        maps = self.grid(torch.relu(self.pool(self.conv2(torch.relu(self.pool(self.conv1(grey)))))))
        return torch.relu(self.linear(maps.flatten(1)))[:, :, None, None]


class FiveLayerCNN(nn.Module):
    """Four convolutions; a `linear` head with `embedding_dim: 3` is the fifth layer (SGSL, Figure 3).

    Widths and BatchNorm are not published: assumed.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        channels = [3, 32, 64, 128, 128]
        self.convs = nn.ModuleList(nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in pairwise(channels))
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for after in channels[1:])
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.num_features = channels[-1]
        start_from(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """Feature maps (N, 128, ceil(H / 16), ceil(W / 16)) of images (N, 3, H, W)."""
        maps = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            maps = torch.relu(self.pool(norm(conv(maps))))
        return maps
