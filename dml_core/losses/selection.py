"""Means over the entries that a mask selects, without waiting for a GPU, which alone knows how many these are."""

import torch
from torch import Tensor


def mean_where(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the entries of `values` where `mask`, of the same shape, is true; scalar, exactly 0 if there are none.

    Entries that are not selected may be infinite; their gradient is 0. On a CPU the entries are taken out first; elsewhere the others count
    as 0, which differs in the last bits only.
    """
    return _mean_of_some(values, mask) if mask.is_cpu else _mean_of_all(values, mask)


def selected(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries of `values` where `mask` is true, with a mask of ones, on a CPU; elsewhere both as they are.

    Gradients of several functions of the entries are then summed before they are added to others, which decides their last bits.
    """
    return (values[mask], mask[mask]) if mask.is_cpu else (values, mask)


def variance_where(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared deviation from `mean_where`; scalar, exactly 0 without entries."""
    deviations = torch.where(mask, values - mean_where(values, mask), 0.0)  # not infinite, for the gradient of a square
    return mean_where(deviations.square(), mask)


def _mean_of_some(values: Tensor, mask: Tensor) -> Tensor:
    some = values[mask]
    return some.mean() if len(some) else some.sum()


def _mean_of_all(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)
