"""What single losses have beside their equation: moving centres, a first radius, the gate, the sum of losses, and the initial values."""

import pytest
import torch
from loss_cases import build, random_batch

from dml_core.losses.contract import Needs
from dml_core.losses.registry import loss_modules

EMBEDDINGS, LABELS = random_batch()


def test_center_loss_moves_its_centres_by_equation_4():
    """Alpha 0.5 and class 0 seen at 2 and 6: 0.5 (2 + 6) / (1 + 2) = 4/3; class 1 seen at 3: 0.5 * 3 / 2; class 2 unseen."""
    loss = build(("center_loss", {}), num_classes=3, dim=1)
    loss(torch.tensor([[2.0], [3.0], [6.0]], dtype=torch.float64), torch.tensor([0, 1, 0]))
    torch.testing.assert_close(loss.centres_CD, torch.tensor([[4 / 3], [0.75], [0.0]], dtype=torch.float64))


def test_center_loss_does_not_move_in_evaluation():
    loss = build(("center_loss", {})).eval()
    loss(EMBEDDINGS, LABELS)
    assert torch.equal(loss.centres_CD, torch.zeros(5, 5, dtype=torch.float64))


def test_ring_loss_starts_at_the_mean_norm():
    loss = build(("ring_loss", {}))
    loss.initialise(torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64), torch.tensor([0, 1]))
    assert loss.radius == 3.0
    assert loss.needs.initial_embeddings


@pytest.mark.parametrize(("gate", "added"), [(1.7, True), (1.5, False)])
def test_sgsl_joins_only_below_its_gate(gate, added):
    """An untrained classifier of 5 classes has a softmax loss of ln 5 = 1.61."""
    output = build(("sgsl", {"gate": gate}))(EMBEDDINGS, LABELS)
    assert (output.parts["sgsl"] > 0) == added
    torch.testing.assert_close(output.total, output.parts["softmax"] + output.parts["sgsl"])


COMBINED = {
    "terms": [
        {"name": "heated_up_softmax", "weight": 2.0, "options": {"better_init": True}},
        {"name": "triplet_batch_hard", "options": {"margin": 0.3}},
    ]
}


def test_combined_needs_what_any_of_its_terms_needs():
    assert build(("combined", COMBINED)).needs == Needs(sampler="k_by_n", global_batch=True, initial_embeddings=True)
    assert build(("combined", {"terms": [{"name": "softmax"}]})).needs == Needs()


def test_combined_passes_epochs_and_embeddings_on():
    loss = build(("combined", COMBINED))
    loss.start_epoch(79, 80)
    assert loss.learning_rate_factor == 0.1
    assert loss.losses[0].alpha == 4.0
    before = loss.losses[0].classifier.weight.clone()
    loss.initialise(EMBEDDINGS, LABELS)
    assert not torch.equal(loss.losses[0].classifier.weight, before)


def test_combined_names_its_parts_and_adds_them_up():
    output = build(("combined", COMBINED))(EMBEDDINGS, LABELS)
    parts = output.parts
    assert set(parts) == {"heated_up_softmax.softmax", "triplet_batch_hard.triplet"}
    torch.testing.assert_close(output.total, 2 * parts["heated_up_softmax.softmax"] + parts["triplet_batch_hard.triplet"])


def test_a_run_depends_on_the_modules_of_its_loss_and_of_its_terms():
    assert loss_modules("softtriple", {}) == {"dml_core.losses.softtriple"}
    assert loss_modules("pml:ArcFaceLoss", {}) == {"dml_core.losses.pml"}
    names = {f"dml_core.losses.{name}" for name in ("combined", "heated_up_softmax", "triplet_batch_hard")}
    assert loss_modules("combined", COMBINED) == names
