"""Base of SoftTriple and HardTriple: K unit-length centres per class, margin and regulariser (Qian et al., ICCV 2019, eq. 8-10).

Shapes: N samples, D embedding dimensions, C classes, K centres per class, P pairs of centres.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from dml_core.losses.class_shards import cross_entropy, mean_over_classes, own_columns
from dml_core.losses.contract import Loss, LossConfig, LossOutput
from dml_core.search_space import searched
from dml_core.unit_length import unit_length

ROOT_EPSILON = 1e-5  # added under eq. 9's root by the released code: keeps the gradient finite when two centres coincide


class MultiCentreConfig(LossConfig):
    """Options.

    Attributes:
        num_centres: K, centres per class (published 10; 2 on SOP; 20 in Figure 3).
        scale: lambda of eq. 8 (not published; 20 in the released code).
        margin: delta of eq. 8 (published 0.01).
        regulariser_weight: tau of eq. 10 (published 0.2; 0 on SOP). No effect if K = 1.
    """

    num_centres: int = Field(default=10, ge=1, le=10_000)
    scale: float = Field(default=20.0, gt=0.0, json_schema_extra=searched(5, 80, log=True))
    margin: float = Field(default=0.01, ge=0.0, json_schema_extra=searched(0, 0.2))
    regulariser_weight: float = Field(default=0.2, ge=0.0, json_schema_extra=searched(0.01, 1, log=True))

    @property
    def without_effect(self) -> frozenset[str]:
        """The regulariser's weight if K = 1: a single centre has no pair to regularise."""
        return frozenset({"regulariser_weight"}) if self.num_centres == 1 else frozenset()


class MultiCentre(Loss):
    """Cross-entropy of similarities to classes with several centres each, with a margin, plus eq. 9's regulariser."""

    config: MultiCentreConfig
    CLASS_DIMS: ClassVar = {"centres_KCD": 1}

    def __init__(self, config: MultiCentreConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        bound = (num_classes * config.num_centres) ** -0.5  # as released; the norm sets how far one optimiser step rotates a centre
        # K before C, so that the similarities have classes last: a softmax over a short last axis of K takes up to four times as long.
        self.centres_KCD = nn.Parameter(torch.empty(config.num_centres, num_classes, embedding_dim).uniform_(-bound, bound))

    @abstractmethod
    def class_similarity(self, sim_NKC: Tensor) -> Tensor:
        """Return the similarity to each class, (N, C), from the similarities to its centres."""

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the batch mean of eq. 6 or 8, plus tau times the mean regulariser (eq. 10)."""
        unit_KCD = unit_length(self.centres_KCD)
        sim_NKC = (unit_length(embeddings_ND) @ unit_KCD.flatten(0, 1).T).view(-1, *unit_KCD.shape[:2])
        logits_NC = self.config.scale * self.class_similarity(sim_NKC)
        own_N1, is_here_N1 = own_columns(labels_N, self.shard)
        margin_N1 = -self.config.scale * self.config.margin * is_here_N1.to(logits_NC.dtype)
        softmax = cross_entropy(logits_NC.scatter_add_(1, own_N1, margin_N1), labels_N, self.shard)
        if self.config.regulariser_weight == 0 or self.config.num_centres == 1:
            return LossOutput(softmax, {"softmax": softmax.detach()})
        regulariser = mean_over_classes(centre_spread(unit_KCD), self.shard)
        total = softmax + self.config.regulariser_weight * regulariser
        return LossOutput(total, {"softmax": softmax.detach(), "regulariser": regulariser.detach()})

    @property
    def centres_CKD(self) -> Tensor:  # noqa: N802
        """Centres by class, detached, as counted by `evaluation.separability.num_unique_centres` (Figure 3)."""
        return self.centres_KCD.detach().transpose(0, 1)


def centre_spread(unit_KCD: Tensor) -> Tensor:
    """Return the sum of eq. 9 over classes, divided by C K (K - 1): half the mean distance of two centres of one class; scalar.

    Only the cosines within the classes are computed, no matrix over all C K centres.
    """
    num_centres, num_classes, _ = unit_KCD.shape
    if num_centres <= 3:  # at most as many pairs as centres: row products; many small matrix products take three times as long
        first_P, second_P = torch.triu_indices(num_centres, num_centres, offset=1, device=unit_KCD.device)
        cos_PC = (unit_KCD[first_P] * unit_KCD[second_P]).sum(dim=-1)
        return _roots(2.0 + ROOT_EPSILON - 2.0 * cos_PC).sum() / (num_classes * num_centres * (num_centres - 1))
    unit_CKD = unit_KCD.transpose(0, 1)
    squared_CKK = torch.baddbmm(unit_KCD.new_full((), 2.0 + ROOT_EPSILON), unit_CKD, unit_CKD.transpose(1, 2), alpha=-2.0)
    return _roots(squared_CKK).triu(1).sum() / (num_classes * num_centres * (num_centres - 1))


def _roots(squared: Tensor) -> Tensor:
    """Return the square roots, clamping to at least ROOT_EPSILON first: products rounded to TF32 put a cosine up to 1e-3 above 1."""
    return squared.clamp_min(ROOT_EPSILON).sqrt()
