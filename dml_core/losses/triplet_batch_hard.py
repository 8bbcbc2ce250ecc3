"""Batch-hard triplet loss (Hermans et al., "In Defense of the Triplet Loss", 2017, eq. 5), with a hinge or the soft margin.

Distances are Euclidean, not squared; embeddings are not normalised here (the head can do it). Shapes: N samples, D dimensions.
"""

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional

from dml_core.losses.contract import PAIRS, Loss, LossConfig, LossOutput
from dml_core.losses.selection import mean_where
from dml_core.search_space import searched


class TripletBatchHardConfig(LossConfig):
    """Options.

    Attributes:
        margin: m of the hinge; None selects the soft margin ln(1 + exp(.)), the paper's best (SoftMargin in SGSL's Table 3).
    """

    margin: float | None = Field(default=None, gt=0.0, json_schema_extra=searched(0.05, 1, log=True))


class TripletBatchHard(Loss):
    """Each anchor with its farthest positive and its nearest negative of the batch."""

    Config = TripletBatchHardConfig
    config: TripletBatchHardConfig
    NEEDS = PAIRS
    COMPARES_WITH_MEMORY = True

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the mean over the anchors that have a positive and a negative; exactly 0 if no anchor has both."""
        own_N = torch.arange(len(labels_N), device=labels_N.device)
        return self.compare(embeddings_ND, labels_N, embeddings_ND, labels_N, own_N, generator)

    def compare(
        self, embeddings_ND: Tensor, labels_N: Tensor, memory_MD: Tensor, labels_M: Tensor, own_N: Tensor, generator: Generator | None
    ) -> LossOutput:
        """Like `compute`, but take the farthest positive and the nearest negative from the memory."""
        same_NM = labels_N[:, None] == labels_M
        positive_NM = same_NM.scatter(1, own_N[:, None], value=False)
        anchor_N = positive_NM.any(dim=1) & (~same_NM).any(dim=1)
        distance_NM = torch.cdist(embeddings_ND, memory_MD)
        hardest_positive_N = distance_NM.masked_fill(~positive_NM, -torch.inf).amax(dim=1)
        hardest_negative_N = distance_NM.masked_fill(same_NM, torch.inf).amin(dim=1)
        excess_N, margin = hardest_positive_N - hardest_negative_N, self.config.margin
        total = mean_where(functional.softplus(excess_N) if margin is None else functional.relu(excess_N + margin), anchor_N)
        return LossOutput(total, {"triplet": total.detach()})
