"""Initial weights that torch has not: TensorFlow's variance scaling, which the released heated-up softmax begins with."""

import math

import torch
from torch import Tensor, nn

from dml_core.unit_length import unit_length

CUT = 2.0  # standard deviations
STD_OF_CUT = 0.87962566103423978  # of a unit normal without what lies beyond CUT


@torch.no_grad()
def truncated_normal_(weight: Tensor, gain: float) -> Tensor:
    """Fill (outputs, inputs, ...) with a normal cut at two deviations, of standard deviation gain / sqrt(inputs to one output).

    A gain of sqrt(2) is TF-slim's default (He et al., 2015); of 1 TensorFlow's own, which gives rows a norm near 1.
    """
    std = gain / math.sqrt(weight[0].numel()) / STD_OF_CUT
    return nn.init.trunc_normal_(weight, std=std, a=-CUT * std, b=CUT * std)


def start_as_slim(layer: nn.Linear | nn.Conv2d) -> None:
    """TF-slim's initial weights (He et al.), biases 0."""
    truncated_normal_(layer.weight, gain=math.sqrt(2))
    _zero_bias(layer)


def start_at_unit_norm(classifier: nn.Linear) -> None:
    """TensorFlow's own initial weights, a norm near 1 for every class, biases 0."""
    truncated_normal_(classifier.weight, gain=1.0)
    _zero_bias(classifier)


@torch.no_grad()
def start_at_class_means(classifier: nn.Linear, embeddings_ND: Tensor, labels_N: Tensor) -> None:
    """Set each class's weights to the direction of its mean embedding; heated-up softmax's released `better_init`."""
    sums_CD = torch.zeros_like(classifier.weight).index_add_(0, labels_N, embeddings_ND.to(classifier.weight))
    classifier.weight.copy_(unit_length(sums_CD))


def _zero_bias(layer: nn.Linear | nn.Conv2d) -> None:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
