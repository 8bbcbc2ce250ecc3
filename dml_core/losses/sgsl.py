"""SGSL, the stop-gradient softmax loss (Yang et al., AAAI 2023, eq. 5-7 and 10), added to a label-smoothed softmax.

Shapes: N samples, D embedding dimensions, C classes.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional

from dml_core.errors import ConfigError
from dml_core.losses.class_shards import ClassShard, cross_entropy, logsumexp, own_logits, without_own
from dml_core.losses.contract import Loss, LossConfig, LossOutput, Needs
from dml_core.search_space import searched
from dml_core.unit_length import unit_length


class SGSLConfig(LossConfig):
    """Options.

    Attributes:
        gamma: scale within the log-sum-exp over the other classes (published 30).
        weight: beta of eq. 10 (published 1).
        gate: apply SGSL only to batches whose softmax loss is at most this (published 3; math.inf: to all).
        label_smoothing: epsilon, spread over the other C - 1 classes (released code: 0.4 on CUB and Cars, 0.1 on SOP and In-shop).
        dropout: share of the features hidden from the softmax but not from SGSL (0.5 in Boudiaf et al., whose settings the paper adopts;
            released code: none).
    """

    gamma: float = Field(default=30.0, gt=0.0, json_schema_extra=searched(5, 80, log=True))
    weight: float = Field(default=1.0, ge=0.0, json_schema_extra=searched(0.1, 10, log=True))
    gate: float = Field(default=3.0, ge=0.0, allow_inf_nan=True, json_schema_extra=searched(0.5, 6))
    label_smoothing: float = Field(default=0.4, ge=0.0, lt=1.0, json_schema_extra=searched(0, 0.6))
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)

    @property
    def without_effect(self) -> frozenset[str]:
        """Options of the stop-gradient term if its weight is 0 or its gate never opens."""
        if self.weight == 0:
            return frozenset({"gamma", "gate"})
        return frozenset() if self.gate else frozenset({"gamma", "weight"})


class SGSL(Loss):
    """Softmax on W f, plus softplus(LSE^gamma over j != y of cos(W_j, f), minus cos(W_y, f)) without a gradient to W."""

    Config = SGSLConfig
    config: SGSLConfig
    NEEDS = Needs(global_batch=True)  # the gate depends on its mean loss (the released code gates each GPU separately)
    CLASS_DIMS: ClassVar = {"weight_CD": 0}

    def __init__(self, config: SGSLConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        # torch spreads epsilon over all C classes; SGSL gives (1 - eps) to the true class and eps to the others.
        self.smoothing = config.label_smoothing * num_classes / (num_classes - 1)
        if self.smoothing > 1.0:
            raise ConfigError(f"loss 'sgsl': label_smoothing {config.label_smoothing} favours the wrong of {num_classes} classes: lower it")
        self.weight_CD = nn.Parameter(torch.empty(num_classes, embedding_dim).normal_(std=0.001))  # as released

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return eq. 7, weighted as in eq. 10."""
        inputs_ND = drop_features(embeddings_ND, self.config.dropout if self.training else 0.0, generator)
        softmax = cross_entropy(inputs_ND @ self.weight_CD.T, labels_N, self.shard, label_smoothing=self.smoothing)
        sgsl = stop_gradient_softmax(embeddings_ND, self.weight_CD, labels_N, self.config.gamma, self.shard)
        gated = torch.where(softmax.detach() <= self.config.gate, sgsl, 0.0)
        total = softmax + self.config.weight * gated
        return LossOutput(total, {"softmax": softmax.detach(), "sgsl": gated.detach()})


def drop_features(embeddings_ND: Tensor, share: float, generator: Generator | None) -> Tensor:
    """Apply dropout drawn by the step's generator: identical after an interruption. Draws nothing for a share of 0."""
    if share == 0:
        return embeddings_ND
    is_kept_ND = torch.rand(embeddings_ND.shape, generator=generator, device=embeddings_ND.device) >= share
    return embeddings_ND * is_kept_ND.to(embeddings_ND) / (1.0 - share)


def stop_gradient_softmax(
    embeddings_ND: Tensor, weight_CD: Tensor, labels_N: Tensor, gamma: float, shard: ClassShard | None = None
) -> Tensor:
    """Return the batch mean of eq. 6; only the embeddings receive gradients."""
    cos_NC = unit_length(embeddings_ND) @ unit_length(weight_CD.detach()).T
    others_N = logsumexp(without_own(gamma * cos_NC, labels_N, shard), shard) / gamma
    return functional.softplus(others_N - own_logits(cos_NC, labels_N, shard)).mean()
