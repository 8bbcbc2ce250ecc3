"""Parts of the tuplet margin loss: the cosine of an angle minus a slack, and random negatives (Yu & Tao, ICCV 2019, 3.2-3.3).

Shapes: N samples, P positive pairs (ordered), G classes in the batch.
"""

import math

import torch
from torch import Generator, Tensor


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
