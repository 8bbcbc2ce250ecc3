"""The embedding network: backbone, pooling, head."""

from torch import Tensor, nn

from dml_core.models.backbones.registry import build_backbone
from dml_core.models.config import ModelConfig
from dml_core.models.heads import build_head
from dml_core.models.pooling import build_pooling


class Embedder(nn.Module):
    """Backbone, pooling and head. `forward` is what the loss sees; `embed` is the test embedding."""

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        self.backbone = build_backbone(config.backbone)
        self.pooling = build_pooling(config.pooling)
        num_features = self.backbone.num_features
        assert isinstance(num_features, int)
        self.head = build_head(config.head, num_features, num_classes)
        self.has_frozen_batchnorm = config.freeze_batchnorm != "none"
        if config.freeze_batchnorm == "all":
            for module in self._backbone_batchnorms():
                module.requires_grad_(False)

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
        if self.has_frozen_batchnorm:
            for module in self._backbone_batchnorms():
                module.eval()
        return self

    def _backbone_batchnorms(self) -> list[nn.Module]:
        return [module for module in self.backbone.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
