"""torchvision's GoogLeNet (Inception v1 with BatchNorm), without pooling, dropout and classifiers.

Its ImageNet weights were converted from TensorFlow's and expect pixels from -1 to 1 (`scaling: minus-one-one`). They are the closest
available ones to heated-up softmax's TF-slim network and to the discriminative loss's GoogLeNet.
"""

import torchvision
from torch import nn

from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.weights import start_from

NOT_FEATURES = ("avgpool", "dropout", "fc", "aux1", "aux2")


class GoogLeNet(nn.Sequential):
    """Feature maps (N, 1024, H / 32, W / 32) of images (N, 3, H, W): the convolutional part, with torchvision's layer names."""

    num_features = 1024

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        source = torchvision.models.GoogLeNet(aux_logits=False, init_weights=False)
        for name, module in source.named_children():
            if name not in NOT_FEATURES:
                self.add_module(name, module)
        start_from(self, config, left_out=("fc.", "aux1.", "aux2."))
