"""The embedding network: backbone, pooling, head."""

from torch import Tensor, nn

from dml_core.config import Config
from dml_core.models.backbones import BackboneConfig, build_backbone
from dml_core.models.heads import HeadConfig, build_head
from dml_core.models.pooling import PoolingConfig, build_pooling


class ModelConfig(Config):
    """The three parts of an embedding network.

    Attributes:
        backbone: images to feature maps.
        pooling: feature maps to one vector an image.
        head: that vector to what the loss sees and to the test embedding.
        freeze_batchnorm: the backbone's BatchNorm keeps its running statistics in training; scale and shift still train.
    """

    backbone: BackboneConfig
    pooling: PoolingConfig = PoolingConfig()
    head: HeadConfig = HeadConfig()
    freeze_batchnorm: bool = False


class Embedder(nn.Module):
    """Backbone, pooling and head. `forward` is what the loss sees; `embed` is the test embedding."""

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        self.backbone = build_backbone(config.backbone)
        self.pooling = build_pooling(config.pooling)
        num_features = self.backbone.num_features
        assert isinstance(num_features, int)
        self.head = build_head(config.head, num_features, num_classes)
        self.freeze_batchnorm = config.freeze_batchnorm

    def forward(self, images: Tensor) -> Tensor:
        """Training output (N, head.output_dim) of images (N, 3, H, W)."""
        output: Tensor = self.head(self.pooling(self.backbone(images)))
        return output

    def embed(self, images: Tensor) -> Tensor:
        """Test embeddings (N, head.embedding_dim) of images (N, 3, H, W)."""
        embeddings: Tensor = self.head.embed(self.pooling(self.backbone(images)))
        return embeddings

    def train(self, mode: bool = True) -> "Embedder":
        """As nn.Module's, but a frozen backbone's BatchNorm stays in evaluation mode."""
        super().train(mode)
        if self.freeze_batchnorm:
            for module in self.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self
