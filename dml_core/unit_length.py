"""Normalisation to unit length, shared by losses, heads and centres."""

import torch
from torch import Tensor

SMALLEST_NORM = 1e-6  # a shorter row stays unchanged: it has no direction, and its gradient would be up to 1e12 times too large


def unit_length(rows: Tensor) -> Tensor:
    """Return rows divided by their norms along the last dimension; rows shorter than SMALLEST_NORM and their gradients are unchanged.

    The gradient of a unit vector grows with 1 / norm and is undefined at 0. A row below the threshold gets the gradient of the identity, so
    that a dead row harms neither the other rows nor an optimiser's moments.
    """
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / torch.where(norms < SMALLEST_NORM, 1.0, norms)
