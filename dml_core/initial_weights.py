"""Initial weights missing from torch: TensorFlow's variance scaling, used by the released heated-up softmax."""

import math

import torch
from torch import Tensor, nn

from dml_core.unit_length import unit_length

STD_OF_CUT = 0.87962566103423978  # of a standard normal truncated at two deviations
SLIM = math.sqrt(2)  # gain: TF-slim's default (He et al., 2015)
UNIT_NORM = 1.0  # gain: TensorFlow's default, which gives rows a norm near 1


@torch.no_grad()
def start_as_tensorflow(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Fill the weights from a normal truncated at two deviations, with standard deviation gain / sqrt(inputs per output); biases are 0."""
    std = gain / math.sqrt(layer.weight[0].numel()) / STD_OF_CUT
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


@torch.no_grad()
def start_at_class_means(classifier: nn.Linear, embeddings_ND: Tensor, labels_N: Tensor) -> None:
    """Set each class's weights to the direction of its mean embedding; heated-up softmax's released `better_init`."""
    sums_CD = torch.zeros_like(classifier.weight).index_add_(0, labels_N, embeddings_ND.to(classifier.weight))
    classifier.weight.copy_(unit_length(sums_CD))
