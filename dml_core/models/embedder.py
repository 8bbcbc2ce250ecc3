"""The embedding network: backbone, pooling, head."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dml_core.models.backbones.registry import build_backbone
from dml_core.models.config import ModelConfig
from dml_core.models.heads import build_head
from dml_core.models.pooling import build_pooling


class Embedder(nn.Module):
    """Backbone, pooling and head. `forward` returns the training output, `embed` the test embedding."""

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        self.backbone = build_backbone(config.backbone)
        self.pooling = build_pooling(config.pooling)
        num_features = self.backbone.num_features
        assert isinstance(num_features, int)
        self.head = build_head(config.head, num_features, num_classes)
        self.has_frozen_statistics = config.freeze_batchnorm in ("statistics", "all")
        for module in self._backbone_batchnorms():
            _set_up_batchnorm(module, config)
        if config.memory_format == "channels_last":
            self.to(memory_format=torch.channels_last)  # feature maps follow the weights' layout from the first convolution on

    def forward(self, images: Tensor) -> Tensor:
        """Training output (N, head.output_dim) of images (N, 3, H, W)."""
        return self.head(self.pooling(self.backbone(images)))

    def embed(self, images: Tensor) -> Tensor:
        """Test embeddings (N, head.embedding_dim) of images (N, 3, H, W)."""
        return self.head.embed(self.pooling(self.backbone(images)))

    def train(self, mode: bool = True) -> "Embedder":
        """Like nn.Module's, but a backbone's BatchNorm with frozen statistics stays in evaluation mode."""
        super().train(mode)
        if self.has_frozen_statistics:
            for module in self._backbone_batchnorms():
                module.eval()
        return self

    def _backbone_batchnorms(self) -> list[nn.modules.batchnorm._BatchNorm]:
        return [module for module in self.backbone.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def network_weights(system_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the network's state dict from that of a trained system, its network and loss (`training.parallel.workers.TrainingSystem`)."""
    return {name.removeprefix("model."): value for name, value in system_state.items() if name.startswith("model.")}


def _set_up_batchnorm(module: nn.modules.batchnorm._BatchNorm, config: ModelConfig) -> None:
    """Freeze parts of one of the backbone's BatchNorms and set its momentum."""
    if config.freeze_batchnorm in ("scale", "all"):
        module.weight.requires_grad_(False)
    if config.freeze_batchnorm == "all":
        module.bias.requires_grad_(False)
    if config.batchnorm_momentum is not None:
        module.momentum = config.batchnorm_momentum
