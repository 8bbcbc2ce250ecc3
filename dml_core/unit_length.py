"""Vectors of length 1: the one place where losses, heads and centres are normalised."""

import torch
from torch import Tensor

SMALLEST_NORM = 1e-6  # of what has a direction; a shorter row, whose gradient would be up to 1e12 times too large, stays as it is


def unit_length(rows: Tensor, dim: int = -1) -> Tensor:
    """Return rows divided by their norms along `dim`; one shorter than SMALLEST_NORM unchanged, with an unchanged gradient.

    The gradient of a unit vector grows with 1 / norm and has no value at 0. A row without a direction gets the gradient of the identity,
    so that a dead row harms neither the other rows nor an optimiser's moments.
    """
    norms = torch.linalg.vector_norm(rows, dim=dim, keepdim=True)
    return rows / torch.where(norms < SMALLEST_NORM, 1.0, norms)
