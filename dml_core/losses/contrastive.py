"""Contrastive loss (Hadsell et al., CVPR 2006, eq. 4) over all pairs of a batch, on unit-length embeddings.

Shapes: N samples, D embedding dimensions, P unordered pairs.
"""

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional

from dml_core.losses.contract import PAIRS, Loss, LossConfig, LossOutput
from dml_core.search_space import searched
from dml_core.unit_length import unit_length


class ContrastiveConfig(LossConfig):
    """Options.

    Attributes:
        margin: m, the distance beyond which a negative pair has zero loss; unit vectors are at most 2 apart (assumed 1).
    """

    margin: float = Field(default=1.0, gt=0.0, le=2.0, json_schema_extra=searched(0.2, 1.6))


class Contrastive(Loss):
    """d^2 / 2 for a pair of the same class, [m - d]_+^2 / 2 for a pair of different classes."""

    Config = ContrastiveConfig
    config: ContrastiveConfig
    NEEDS = PAIRS
    COMPARES_WITH_MEMORY = True

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the mean over all pairs; exactly 0 for a single sample."""
        if len(labels_N) < 2:
            return LossOutput(embeddings_ND.sum() * 0.0, {})
        first_P, second_P = torch.triu_indices(len(labels_N), len(labels_N), offset=1, device=labels_N.device)
        unit_ND = unit_length(embeddings_ND)
        distance_P = torch.cdist(unit_ND, unit_ND)[first_P, second_P]  # by matrix product: pdist takes three times as long at 512-d
        total = 0.5 * self._terms(distance_P, labels_N[first_P] == labels_N[second_P]).mean()
        return LossOutput(total, {"contrastive": total.detach()})

    def compare(
        self, embeddings_ND: Tensor, labels_N: Tensor, memory_MD: Tensor, labels_M: Tensor, own_N: Tensor, generator: Generator | None
    ) -> LossOutput:
        """Return the mean over all pairs of a sample and another sample of the memory; exactly 0 if there is no other sample."""
        distance_NM = torch.cdist(unit_length(embeddings_ND), unit_length(memory_MD))
        terms_NM = self._terms(distance_NM, labels_N[:, None] == labels_M).scatter(1, own_N[:, None], 0.0)
        total = 0.5 * terms_NM.sum() / max(1, len(labels_N) * (len(labels_M) - 1))
        return LossOutput(total, {"contrastive": total.detach()})

    def _terms(self, distances: Tensor, are_same: Tensor) -> Tensor:
        """Return twice the loss of each pair."""
        return torch.where(are_same, distances.square(), functional.relu(self.config.margin - distances).square())
