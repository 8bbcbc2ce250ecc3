"""Normalised softmax (Qian et al., "SoftTriple Loss", ICCV 2019, eq. 3): one unit-length centre per class.

Proposition 1 of the paper: this is a triplet loss over (sample, own centre, other centre), smoothed by an entropy term.
Shapes: N samples, D embedding dimensions, C classes.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from dml_core.losses.class_shards import cross_entropy
from dml_core.losses.contract import Loss, LossConfig, LossOutput
from dml_core.search_space import searched
from dml_core.unit_length import unit_length


class NormalisedSoftmaxConfig(LossConfig):
    """Options.

    Attributes:
        scale: lambda of eq. 3. Not published; SoftTriple's released code uses 20 for its own lambda.
    """

    scale: float = Field(default=20.0, gt=0.0, json_schema_extra=searched(5, 80, log=True))


class NormalisedSoftmax(Loss):
    """-log(exp(lambda w_y.x) / sum_j exp(lambda w_j.x)) with unit-length w and x."""

    Config = NormalisedSoftmaxConfig
    config: NormalisedSoftmaxConfig
    CLASS_DIMS: ClassVar = {"centres_CD": 0}

    def __init__(self, config: NormalisedSoftmaxConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        bound = num_classes**-0.5  # as in released SoftTriple with K = 1; the norm sets how far one step rotates a centre
        self.centres_CD = nn.Parameter(torch.empty(num_classes, embedding_dim).uniform_(-bound, bound))

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the batch mean of eq. 3."""
        scaled_ND = self.config.scale * unit_length(embeddings_ND)  # not at the logits, which takes a second N x C tensor
        total = cross_entropy(scaled_ND @ unit_length(self.centres_CD).T, labels_N, self.shard)
        return LossOutput(total, {"softmax": total.detach()})
