"""Ring loss (Zheng et al., CVPR 2018; SGSL eq. 4): pulls embedding norms to a learned radius. Used together with a softmax (`combined`).

Shapes: N samples, D embedding dimensions.
"""

import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from dml_core.losses.contract import Loss, LossConfig, LossOutput, Needs
from dml_core.search_space import searched


class RingLossConfig(LossConfig):
    """Options.

    Attributes:
        weight: lambda (published 0.01).
    """

    weight: float = Field(default=0.01, ge=0.0, json_schema_extra=searched(1e-3, 1, log=True))


class RingLoss(Loss):
    """lambda / 2 (||x|| - R)^2 with a learned R, initially the mean norm of the training set's embeddings."""

    Config = RingLossConfig
    config: RingLossConfig
    NEEDS = Needs(initial_embeddings=True)  # for the initial radius

    def __init__(self, config: RingLossConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        self.radius = nn.Parameter(torch.ones(()))

    @torch.no_grad()
    def initialise(self, embeddings_ND: Tensor, labels_N: Tensor) -> None:
        """Set the radius to the mean norm."""
        self.radius.copy_(torch.linalg.vector_norm(embeddings_ND, dim=1).mean())

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the batch mean."""
        norm_N = torch.linalg.vector_norm(embeddings_ND, dim=1)
        total = 0.5 * self.config.weight * (norm_N - self.radius).square().mean()
        return LossOutput(total, {"ring": total.detach()})
