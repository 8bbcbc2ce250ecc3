"""Entries selected by a mask: values and gradients to the last bit, which decide what a long training ends in."""

import torch
from torch import Tensor

from dml_core.losses.selection import mean_where, selected


def by_hand(cos: Tensor, mask: Tensor) -> Tensor:
    some = cos[mask]
    return (0.99 * some.mean() - some).relu().square().mean()


def in_place(cos: Tensor, mask: Tensor) -> Tensor:
    """Return the same mean of squares around a mean, as the tuplet margin loss has it."""
    return mean_where((0.99 * mean_where(cos, mask) - cos).relu().square(), mask)


def test_gradients_of_selected_entries_are_summed_before_they_meet_others() -> None:
    generator = torch.Generator().manual_seed(0)
    num_differing = 0
    for _ in range(20):
        values, mask = torch.randn(24, 24, generator=generator), torch.rand(24, 24, generator=generator) < 0.8
        gradients = []
        for function, is_selected in ((by_hand, False), (in_place, True), (in_place, False)):
            leaf = values.clone().requires_grad_()
            cos = leaf @ leaf.T
            (function(*selected(cos, mask) if is_selected else (cos, mask)) + cos.exp().log1p().mean()).backward()
            gradients.append(leaf.grad)
        expected, of_selected, of_all = (gradient for gradient in gradients if gradient is not None)
        assert torch.equal(expected, of_selected)
        num_differing += not torch.equal(expected, of_all)
    assert num_differing, "the order of sums does not matter here, so this test shows nothing"
