"""SoftTriple's and HardTriple's parts that the paper's figures rest on."""

import math

import torch

from dml_core.losses.multi_centre import ROOT_EPSILON, centre_spread
from dml_core.losses.registry import build_loss


def unit_circle(*degrees):
    return torch.tensor([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees], dtype=torch.float64)


def test_unique_centres_are_counted_through_chains():
    """Class 0: 0 and 2 degrees near, 4 near to 2, far from 90: two centres. Class 1: four far ones. Class 2: one."""
    loss = build_loss("softtriple", {"num_centres": 4}, 3, 2).double()
    classes = [unit_circle(0, 2, 4, 90), unit_circle(0, 90, 180, 270), unit_circle(7, 7, 7, 7)]
    loss.centres_CKD.data = 3.0 * torch.stack(classes)
    assert loss.num_unique_centres(tolerance=0.05).tolist() == [2, 4, 1]


def test_regulariser_of_centres_at_known_angles():
    """Two centres at 60 degrees lie 1 apart: eq. 9 is 1, eq. 10 divides by C K (K - 1) = 2."""
    spread = centre_spread(unit_circle(0, 60)[None])
    torch.testing.assert_close(spread, torch.tensor(math.sqrt(1 + ROOT_EPSILON) / 2, dtype=torch.float64))


def test_merged_centres_keep_a_finite_gradient():
    centres_CKD = torch.ones(2, 3, 4, requires_grad=True)
    centre_spread(torch.nn.functional.normalize(centres_CKD, dim=-1)).backward()
    assert torch.isfinite(centres_CKD.grad).all()


def test_regulariser_pulls_centres_of_a_class_together():
    loss = build_loss("softtriple", {"num_centres": 3, "regulariser_weight": 50.0}, 4, 8)
    embeddings_ND, labels_N = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    optimiser = torch.optim.SGD(loss.parameters(), lr=0.01)
    before = loss.num_unique_centres().sum()
    for _ in range(300):
        optimiser.zero_grad()
        loss(embeddings_ND, labels_N).total.backward()
        optimiser.step()
    assert before == 12
    assert loss.num_unique_centres().sum() == 4
