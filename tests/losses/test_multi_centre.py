"""Parts of SoftTriple and HardTriple that the paper's figures depend on."""

import math

import torch

from dml_core.evaluation.separability import num_unique_centres
from dml_core.losses.multi_centre import ROOT_EPSILON, centre_spread
from dml_core.losses.registry import build_loss


def unit_circle(*degrees):
    return torch.tensor([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees], dtype=torch.float64)


def test_regulariser_of_centres_at_known_angles():
    """Two centres at 60 degrees have distance 1: eq. 9 is 1, eq. 10 divides by C K (K - 1) = 2."""
    spread = centre_spread(unit_circle(0, 60)[:, None])
    torch.testing.assert_close(spread, torch.tensor(math.sqrt(1 + ROOT_EPSILON) / 2, dtype=torch.float64))


def test_merged_centres_keep_a_finite_gradient():
    centres_KCD = torch.ones(3, 2, 4, requires_grad=True)
    centre_spread(torch.nn.functional.normalize(centres_KCD, dim=-1)).backward()
    assert torch.isfinite(centres_KCD.grad).all()


def test_regulariser_pulls_centres_of_a_class_together():
    loss = build_loss("softtriple", {"num_centres": 3, "regulariser_weight": 50.0}, 4, 8)
    embeddings_ND, labels_N = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    optimiser = torch.optim.SGD(loss.parameters(), lr=0.01)
    before = num_unique_centres(loss.centres_CKD.numpy())
    for _ in range(300):
        optimiser.zero_grad()
        loss(embeddings_ND, labels_N).total.backward()
        optimiser.step()
    assert before.tolist() == [3, 3, 3, 3]
    assert num_unique_centres(loss.centres_CKD.numpy()).tolist() == [1, 1, 1, 1]
