"""Tuplet margin loss with intra-pair variation (Yu & Tao, "Deep Metric Learning with Tuplet Margin Loss", ICCV 2019, eq. 13-17).

Shapes: N samples, D embedding dimensions, P positive pairs (ordered), G classes in the batch.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional

from dml_core.losses.contract import PAIRS, Loss, LossConfig, LossOutput
from dml_core.search_space import searched
from dml_core.unit_length import unit_length


class TupletMarginConfig(LossConfig):
    """Options.

    Attributes:
        scale: s of eq. 13 (published 64).
        slack_margin: beta of eq. 13 in radians (published 0.1).
        negatives: "random" draws one sample of each other class per positive pair (published, section 3.2); "all" uses every negative.
        variance_weight: lambda of eq. 17 (published 0.5).
        variance_epsilon: epsilon of eq. 15 and 16 (published 0.01).
    """

    scale: float = Field(default=64.0, gt=0.0, json_schema_extra=searched(8, 128, log=True))
    slack_margin: float = Field(default=0.1, ge=0.0, lt=torch.pi / 2, json_schema_extra=searched(0, 0.5))
    negatives: Literal["random", "all"] = "random"
    variance_weight: float = Field(default=0.5, ge=0.0, json_schema_extra=searched(0.05, 5, log=True))
    variance_epsilon: float = Field(default=0.01, ge=0.0, lt=1.0)


class TupletMargin(Loss):
    """log(1 + sum_i exp(s (cos an_i - cos(ap - beta)))), mean over the positive pairs, plus lambda (L_pos + L_neg)."""

    Config = TupletMarginConfig
    config: TupletMarginConfig
    NEEDS = PAIRS

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return eq. 17; exactly 0 if the batch has no positive or no negative pair."""
        same_NN = labels_N[:, None] == labels_N
        other_NN = ~same_NN
        anchor_P, positive_P = (same_NN & ~torch.eye(len(labels_N), dtype=torch.bool, device=labels_N.device)).nonzero(as_tuple=True)
        if not len(anchor_P) or not other_NN.any():
            return LossOutput(embeddings_ND.sum() * 0.0, {})
        unit_ND = unit_length(embeddings_ND)
        cos_NN = unit_ND @ unit_ND.T
        cos_ap_P = cos_NN[anchor_P, positive_P]
        negative_P = self._log_sum_negatives(cos_NN, other_NN, labels_N, anchor_P, generator)
        positive_P = self.config.scale * cos_with_slack(cos_ap_P, self.config.slack_margin)
        tuplet = functional.softplus(negative_P - positive_P).mean()
        spread = self._pair_variation(cos_ap_P, 1.0) + self._pair_variation(cos_NN[other_NN], -1.0)
        total = tuplet + self.config.variance_weight * spread
        return LossOutput(total, {"tuplet": tuplet.detach(), "pair_variation": spread.detach()})

    def _log_sum_negatives(
        self, cos_NN: Tensor, other_NN: Tensor, labels_N: Tensor, anchor_P: Tensor, generator: Generator | None
    ) -> Tensor:
        """Return log sum_i exp(s cos an_i) for each positive pair, (P,)."""
        if self.config.negatives == "all":
            logits_NN = (self.config.scale * cos_NN).masked_fill(~other_NN, -torch.inf)
            return logits_NN.logsumexp(dim=1)[anchor_P]
        negative_PG, own_PG = random_negatives(labels_N, anchor_P, generator)
        logits_PG = self.config.scale * cos_NN[anchor_P[:, None], negative_PG]
        return logits_PG.masked_fill(own_PG, -torch.inf).logsumexp(dim=1)

    def _pair_variation(self, cos: Tensor, sign: float) -> Tensor:
        """Return eq. 15 (sign 1, positive pairs) or 16 (sign -1, negative pairs): the mean squared excess beyond the mean cosine."""
        bound = (1.0 - sign * self.config.variance_epsilon) * cos.mean()
        return functional.relu(sign * (bound - cos)).square().mean()


def cos_with_slack(cos: Tensor, slack: float) -> Tensor:
    """Return cos(theta - slack) from cos(theta); value and gradient are finite, also at theta = 0 and pi.

    cos(theta - slack) = cos(theta) cos(slack) + sin(theta) sin(slack). The sine's gradient is infinite at 0, as is the arc cosine's, so
    a sine below the rounding error of the cosine is replaced by exactly 0, with a zero gradient.
    """
    squared_sine = 1.0 - cos.square()
    known = squared_sine > 64 * torch.finfo(cos.dtype).eps
    sine = torch.where(known, squared_sine, 1.0).sqrt() * known
    return cos * math.cos(slack) + sine * math.sin(slack)


def random_negatives(labels_N: Tensor, anchor_P: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """Draw one sample of each class of the batch for each positive pair, uniformly within the class.

    Returns:
        Indices of the drawn samples (P, G), and a mask (P, G) that is true for the anchor's own class.
    """
    _, class_N, count_G = torch.unique(labels_N, return_inverse=True, return_counts=True)
    by_class_N = class_N.argsort(stable=True)
    first_G = count_G.cumsum(0) - count_G
    draw_PG = torch.rand(len(anchor_P), len(count_G), generator=generator).to(labels_N.device)
    place_PG = first_G + (draw_PG * count_G).long()
    own_PG = class_N[anchor_P][:, None] == torch.arange(len(count_G), device=labels_N.device)
    return by_class_N[place_PG], own_PG
