"""torchvision's ResNets without pooling and classifier, with the modifications of SGSL (Yang et al., AAAI 2023).

RBR ("ReLU and BatchNorm removal") removes the last two modules, so that features may be negative.
"""

import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.weights import start_from

NOT_FEATURES = ("avgpool", "fc")


class ResNet(nn.Sequential):
    """Feature maps (N, 512 or 2048, H / 32, W / 32), / 16 with last stride 1, of images (N, 3, H, W), with torchvision's layer names.

    RBR removes the last block's last BatchNorm.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        source = torchvision.models.get_model(config.name, weights=None)
        self.num_features: int = source.fc.in_features
        for name, module in source.named_children():
            if name not in NOT_FEATURES:
                self.add_module(name, module)
        start_from(self, config, left_out=("fc.",))
        if config.stem_pool == "ceil":
            self.maxpool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        if config.last_stride == 1:
            _unstride(source.layer4[0])
        if config.rbr != "none":
            source.layer4[-1] = OpenBlock(source.layer4[-1], keep_inner_relu=config.rbr == "published")


class OpenBlock(nn.Module):
    """A stage's last residual block without its last BatchNorm and ReLU.

    Args:
        block: block with its weights, whose layers and names are reused.
        keep_inner_relu: keep the ReLUs within the block.
    """

    def __init__(self, block: BasicBlock | Bottleneck, keep_inner_relu: bool) -> None:
        super().__init__()
        assert block.downsample is None
        self.conv1, self.bn1, self.conv2 = block.conv1, block.bn1, block.conv2
        if isinstance(block, Bottleneck):
            self.bn2, self.conv3 = block.bn2, block.conv3
        self.relu = nn.ReLU(inplace=True) if keep_inner_relu else nn.Identity()

    def forward(self, maps: Tensor) -> Tensor:
        """Map (N, C, h, w) to (N, C, h, w)."""
        residual = self.conv2(self.relu(self.bn1(self.conv1(maps))))
        if hasattr(self, "conv3"):
            residual = self.conv3(self.relu(self.bn2(residual)))
        return maps + residual


def _unstride(block: BasicBlock | Bottleneck) -> None:
    """Set the stride of a stage's first block to 1."""
    strided = block.conv2 if isinstance(block, Bottleneck) else block.conv1
    assert block.downsample is not None
    strided.stride = block.downsample[0].stride = (1, 1)
