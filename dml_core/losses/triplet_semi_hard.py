"""Triplet loss with semi-hard negatives (Schroff et al., "FaceNet", CVPR 2015, section 3) on squared distances of unit-length embeddings.

Shapes: N samples, D embedding dimensions.
"""

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional

from dml_core.losses.contract import PAIRS, Loss, LossConfig, LossOutput
from dml_core.losses.selection import mean_where
from dml_core.search_space import searched
from dml_core.unit_length import unit_length


class TripletSemiHardConfig(LossConfig):
    """Options.

    Attributes:
        margin: alpha (published 0.2), on squared distances.
    """

    margin: float = Field(default=0.2, gt=0.0, json_schema_extra=searched(0.05, 0.8, log=True))


class TripletSemiHard(Loss):
    """[d_ap - d_an + alpha]_+ for each positive pair with its nearest negative beyond d_ap, or its farthest negative if none is beyond."""

    Config = TripletSemiHardConfig
    config: TripletSemiHardConfig
    NEEDS = PAIRS

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the mean over the positive pairs whose anchor has a negative; exactly 0 if there are none."""
        same_NN = labels_N[:, None] == labels_N
        num_negatives_N1 = (~same_NN).sum(dim=1, keepdim=True)
        pair_NN = same_NN.clone().fill_diagonal_(False) & (num_negatives_N1 > 0)
        unit_ND = unit_length(embeddings_ND)
        distance_NN = 2.0 - 2.0 * unit_ND @ unit_ND.T
        negatives_NN = distance_NN.masked_fill(same_NN, torch.inf).sort(dim=1).values
        # A negative at the positive's distance is not beyond it, even if the two distances round differently.
        rounding = 32 * torch.finfo(distance_NN.dtype).eps
        place_NN = torch.searchsorted(negatives_NN.detach(), distance_NN.detach() + rounding)
        place_NN = torch.minimum(place_NN, (num_negatives_N1 - 1).clamp_min(0))
        violation_NN = distance_NN - negatives_NN.gather(1, place_NN) + self.config.margin
        total = mean_where(functional.relu(violation_NN), pair_NN)
        return LossOutput(total, {"triplet": total.detach()})
