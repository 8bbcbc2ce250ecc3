"""Initial weights missing from torch: TensorFlow's variance scaling, used by the released heated-up softmax."""

import math

import torch
from torch import Tensor, nn

from dml_core.unit_length import unit_length

CUT = 2.0  # standard deviations
STD_OF_CUT = 0.87962566103423978  # of a standard normal truncated at CUT


@torch.no_grad()
def truncated_normal_(weight: Tensor, gain: float) -> Tensor:
    """Fill (outputs, inputs, ...) from a normal truncated at two deviations, with standard deviation gain / sqrt(inputs per output).

    A gain of sqrt(2) is TF-slim's default (He et al., 2015); a gain of 1 is TensorFlow's default, which gives rows a norm near 1.
    """
    std = gain / math.sqrt(weight[0].numel()) / STD_OF_CUT
    return nn.init.trunc_normal_(weight, std=std, a=-CUT * std, b=CUT * std)


def start_as_slim(layer: nn.Linear | nn.Conv2d) -> None:
    """Set TF-slim's initial weights (He et al.), with zero biases."""
    _start(layer, gain=math.sqrt(2))


def start_at_unit_norm(classifier: nn.Linear) -> None:
    """Set TensorFlow's default initial weights, with a norm near 1 for every class and zero biases."""
    _start(classifier, gain=1.0)


@torch.no_grad()
def start_at_class_means(classifier: nn.Linear, embeddings_ND: Tensor, labels_N: Tensor) -> None:
    """Set each class's weights to the direction of its mean embedding; heated-up softmax's released `better_init`."""
    sums_CD = torch.zeros_like(classifier.weight).index_add_(0, labels_N, embeddings_ND.to(classifier.weight))
    classifier.weight.copy_(unit_length(sums_CD))


def _start(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    truncated_normal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
