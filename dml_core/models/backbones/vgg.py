"""torchvision's VGG-16 up to its last convolution; the discriminative loss's paper max-pools these maps (pooling `max`)."""

import torchvision
from torch import nn

from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.weights import start_from

LAST_RELU = 29  # features[30] is the pooling after conv5_3


class VGG16(nn.Sequential):
    """Feature maps (N, 512, H / 16, W / 16) of images (N, 3, H, W): the thirteen convolutions, with torchvision's names."""

    num_features = 512

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        # The classifier has 123 million of VGG-16's parameters and is never built.
        features = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["D"])[: LAST_RELU + 1]
        for module in features:
            if isinstance(module, nn.Conv2d):  # as torchvision's VGG does
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        self.add_module("features", features)
        start_from(self, config, left_out=("classifier.",))
