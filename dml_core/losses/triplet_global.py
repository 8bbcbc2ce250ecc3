"""Triplet loss plus a global loss on the batch's distances, as in smart mining (Harwood et al., ICCV 2017).

Written from descriptions only: "combines the triplet model and the global structure of the embedding space" (that paper's abstract), "a
global loss function that uses the first and second order statistics of sample distance distribution" (discriminative loss, section 2, of
Kumar et al., CVPR 2016). The constants are assumed. Distances are squared distances of unit-length embeddings, divided by 4: 0 to 1.

Shapes: N samples, D embedding dimensions, P positive pairs (ordered).
"""

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional

from dml_core.losses.contract import PAIRS, Loss, LossConfig, LossOutput
from dml_core.losses.selection import mean_where, variance_where
from dml_core.search_space import searched
from dml_core.unit_length import unit_length


class TripletGlobalConfig(LossConfig):
    """Options; all assumed.

    Attributes:
        margin: margin of the triplets.
        global_margin: margin of the mean negative distance over the mean positive one.
        mean_weight: weight of the means relative to the variances in the global loss.
        global_weight: weight of the global loss relative to the triplets.
    """

    margin: float = Field(default=0.01, gt=0.0, json_schema_extra=searched(1e-3, 0.5, log=True))
    global_margin: float = Field(default=0.4, ge=0.0, json_schema_extra=searched(0.05, 1))
    mean_weight: float = Field(default=0.8, ge=0.0, json_schema_extra=searched(0.1, 5, log=True))
    global_weight: float = Field(default=1.0, ge=0.0, json_schema_extra=searched(0.1, 10, log=True))

    @property
    def without_effect(self) -> frozenset[str]:
        """Options of a term whose weight is 0."""
        if self.global_weight == 0:
            return frozenset({"mean_weight", "global_margin"})
        return frozenset() if self.mean_weight else frozenset({"global_margin"})


class TripletGlobal(Loss):
    """Mean of [d+ - d- + margin]_+, plus global_weight (var d+ + var d- + mean_weight [mean d+ - mean d- + global_margin]_+).

    The triplets are the positive pairs of the batch, each with the anchor's nearest negative: the mined one, or a nearer one of another
    triplet.
    """

    Config = TripletGlobalConfig
    config: TripletGlobalConfig
    NEEDS = PAIRS

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Use the positive pairs whose anchor has a negative; exactly 0 if there are none."""
        same_NN = labels_N[:, None] == labels_N
        pair_NN = same_NN.clone().fill_diagonal_(False) & (~same_NN).any(dim=1, keepdim=True)
        unit_ND = unit_length(embeddings_ND)
        distance_NN = (1.0 - unit_ND @ unit_ND.T) / 2
        nearest_NN = distance_NN.masked_fill(same_NN, torch.inf).amin(dim=1, keepdim=True).expand_as(distance_NN)
        triplet = mean_where(functional.relu(distance_NN - nearest_NN + self.config.margin), pair_NN)
        spread = variance_where(distance_NN, pair_NN) + variance_where(nearest_NN, pair_NN)
        gap = functional.relu(mean_where(distance_NN, pair_NN) - mean_where(nearest_NN, pair_NN) + self.config.global_margin)
        whole = (spread + self.config.mean_weight * gap) * pair_NN.any()
        return LossOutput(triplet + self.config.global_weight * whole, {"triplet": triplet.detach(), "global": whole.detach()})
