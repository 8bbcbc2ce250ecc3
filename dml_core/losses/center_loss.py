"""Center loss (Wen et al., ECCV 2016, eq. 2-4; SGSL eq. 1): pulls samples to running class centres. Used with a softmax (`combined`).

Shapes: N samples, D embedding dimensions, C classes.
"""

import torch
from pydantic import Field
from torch import Generator, Tensor

from dml_core.losses.contract import Loss, LossConfig, LossOutput, Needs
from dml_core.search_space import searched


class CenterLossConfig(LossConfig):
    """Options.

    Attributes:
        weight: lambda (published 0.003).
        centre_rate: alpha, the rate at which a batch moves the centres of its classes (published 0.5).
    """

    weight: float = Field(default=0.003, ge=0.0, json_schema_extra=searched(1e-4, 0.1, log=True))
    centre_rate: float = Field(default=0.5, gt=0.0, le=1.0, json_schema_extra=searched(0.1, 1))


class CenterLoss(Loss):
    """lambda / 2 ||x - c_y||^2. The centres move by eq. 4, at their own rate, not by the optimiser."""

    Config = CenterLossConfig
    config: CenterLossConfig
    NEEDS = Needs(global_batch=True)  # eq. 4 counts the samples of each class in the global batch

    def __init__(self, config: CenterLossConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        self.register_buffer("centres_CD", torch.zeros(num_classes, embedding_dim))

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the batch mean at the current centres, then move the centres if training."""
        centres_CD = self.get_buffer("centres_CD")
        difference_ND = embeddings_ND - centres_CD[labels_N]
        total = 0.5 * self.config.weight * difference_ND.square().sum(dim=1).mean()
        if self.training:
            self._move_centres(centres_CD, difference_ND.detach(), labels_N)
        return LossOutput(total, {"center": total.detach()})

    def _move_centres(self, centres_CD: Tensor, difference_ND: Tensor, labels_N: Tensor) -> None:
        """Apply eq. 4: c_j += alpha sum_{y_i = j} (x_i - c_j) / (1 + number of samples of class j)."""
        counts_C = labels_N.new_zeros(self.num_classes).index_add_(0, labels_N, torch.ones_like(labels_N))
        sums_CD = torch.zeros_like(centres_CD).index_add_(0, labels_N, difference_ND.to(centres_CD.dtype))
        centres_CD += self.config.centre_rate * sums_CD / (1 + counts_C)[:, None]
