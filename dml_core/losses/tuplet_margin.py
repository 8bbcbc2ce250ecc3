"""Tuplet margin loss with intra-pair variation (Yu & Tao, "Deep Metric Learning with Tuplet Margin Loss", ICCV 2019, eq. 13-17).

Shapes: N samples, D embedding dimensions, P positive pairs (ordered), G classes in the batch.
"""

import math
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional

from dml_core.losses.contract import Loss, LossConfig, LossOutput, Needs
from dml_core.losses.selection import mean_where, selected
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
    """log(1 + sum_i exp(s (cos an_i - cos(ap - beta)))), mean over the positive pairs, plus lambda (L_pos + L_neg).

    The number of pairs depends on the labels, so labels on the CPU avoid waiting for a GPU.
    """

    Config = TupletMarginConfig
    config: TupletMarginConfig
    NEEDS = Needs(sampler="k_by_n", global_batch=True, labels_on_cpu=True)

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return eq. 17; exactly 0 if the batch has no positive or no negative pair."""
        batch = batch_pairs(labels_N.cpu())
        if not len(batch.anchors) or len(batch.sizes) == 1:
            return LossOutput(embeddings_ND.sum() * 0.0, {})
        batch = BatchPairs(*(_sent(part, embeddings_ND.device) for part in batch))
        other_NN = batch.classes[:, None] != batch.classes
        unit_ND = unit_length(embeddings_ND)
        cos_NN = unit_ND @ unit_ND.T
        cos_ap_P = cos_NN[batch.anchors, batch.positives]
        negative_P = self._log_sum_negatives(cos_NN, other_NN, batch, generator)
        positive_P = self.config.scale * cos_with_slack(cos_ap_P, self.config.slack_margin)
        tuplet = functional.softplus(negative_P - positive_P).mean()
        spread = self._pair_variation(cos_ap_P, torch.ones_like(cos_ap_P, dtype=torch.bool), 1.0)
        spread = spread + self._pair_variation(*selected(cos_NN, other_NN), -1.0)
        total = tuplet + self.config.variance_weight * spread
        return LossOutput(total, {"tuplet": tuplet.detach(), "pair_variation": spread.detach()})

    def _log_sum_negatives(self, cos_NN: Tensor, other_NN: Tensor, batch: "BatchPairs", generator: Generator | None) -> Tensor:
        """Return log sum_i exp(s cos an_i) for each positive pair, (P,)."""
        if self.config.negatives == "all":
            logits_NN = (self.config.scale * cos_NN).masked_fill(~other_NN, -torch.inf)
            return logits_NN.logsumexp(dim=1)[batch.anchors]
        negative_PG, own_PG = random_negatives(batch, generator)
        logits_PG = self.config.scale * cos_NN[batch.anchors[:, None], negative_PG]
        return logits_PG.masked_fill(own_PG, -torch.inf).logsumexp(dim=1)

    def _pair_variation(self, cos: Tensor, is_pair: Tensor, sign: float) -> Tensor:
        """Return eq. 15 (sign 1, positive pairs) or 16 (sign -1, negative pairs): the mean squared excess beyond the mean cosine."""
        bound = (1.0 - sign * self.config.variance_epsilon) * mean_where(cos, is_pair)
        return mean_where(functional.relu(sign * (bound - cos)).square(), is_pair)


def cos_with_slack(cos: Tensor, slack: float) -> Tensor:
    """Return cos(theta - slack) from cos(theta); value and gradient are finite, also at theta = 0 and pi.

    cos(theta - slack) = cos(theta) cos(slack) + sin(theta) sin(slack). The sine's gradient is infinite at 0, as is the arc cosine's, so
    a sine below the rounding error of the cosine is replaced by exactly 0, with a zero gradient.
    """
    squared_sine = 1.0 - cos.square()
    known = squared_sine > 64 * torch.finfo(cos.dtype).eps
    sine = torch.where(known, squared_sine, 1.0).sqrt() * known
    return cos * math.cos(slack) + sine * math.sin(slack)


class BatchPairs(NamedTuple):
    """Positive pairs and classes of a batch.

    Attributes:
        anchors: index of each pair's anchor, (P,).
        positives: index of its positive, (P,).
        classes: class of each sample, numbered from 0 within the batch, (N,).
        sizes: number of samples of each class, (G,).
        by_class: indices of the samples, ordered by class, (N,).
    """

    anchors: Tensor
    positives: Tensor
    classes: Tensor
    sizes: Tensor
    by_class: Tensor


def batch_pairs(labels_N: Tensor) -> BatchPairs:
    """Return the positive pairs and classes of a batch; waits for a GPU if the labels are on one."""
    same_NN = labels_N[:, None] == labels_N
    anchor_P, positive_P = same_NN.fill_diagonal_(False).nonzero(as_tuple=True)
    _, class_N, count_G = torch.unique(labels_N, return_inverse=True, return_counts=True)
    return BatchPairs(anchor_P, positive_P, class_N, count_G, class_N.argsort(stable=True))


def random_negatives(batch: BatchPairs, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """Draw one sample of each class of the batch for each positive pair, uniformly within the class.

    Returns:
        Indices of the drawn samples (P, G), and a mask (P, G) that is true for the anchor's own class.
    """
    first_G, device = batch.sizes.cumsum(0) - batch.sizes, batch.anchors.device
    draw_PG = torch.rand(len(batch.anchors), len(batch.sizes), generator=generator, device=device)
    place_PG = first_G + (draw_PG * batch.sizes).long()
    own_PG = batch.classes[batch.anchors][:, None] == torch.arange(len(batch.sizes), device=device)
    return batch.by_class[place_PG], own_PG


def _sent(part: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on `device`. Memory is pinned for a GPU, as the CPU would wait for a copy from other memory."""
    return (part.pin_memory() if device.type == "cuda" else part).to(device, non_blocking=True)
