"""Parts of single losses besides the equation: moving centres, initial radius, gate, weighted sums of losses, and initial values."""

import pytest
import torch
from loss_cases import CASES, build, case_id, random_batch
from torch.nn import functional

from dml_core.losses.contract import Needs
from dml_core.losses.registry import loss_modules
from dml_core.losses.sgsl import drop_features

EMBEDDINGS, LABELS = random_batch()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_center_loss_moves_its_centres_by_equation_4(dtype):
    """Alpha 0.5, class 0 seen at 2 and 6: 0.5 (2 + 6) / (1 + 2) = 4/3; class 1 seen at 3: 0.5 * 3 / 2; class 2 unseen."""
    loss = build(("center_loss", {}), num_classes=3, dim=1).to(dtype)
    loss(torch.tensor([[2.0], [3.0], [6.0]], dtype=torch.float64), torch.tensor([0, 1, 0]))
    torch.testing.assert_close(loss.centres_CD, torch.tensor([[4 / 3], [0.75], [0.0]], dtype=dtype))


def test_center_loss_is_measured_from_centres_that_have_moved():
    """lambda / 2 times the mean of 2^2 and 0; then 1 + 0.5 * 2 / (1 + 1) = 1.5, and a centre at its image does not move."""
    loss = build(("center_loss", {"weight": 0.5}), num_classes=2, dim=1)
    loss.centres_CD[:] = torch.tensor([[1.0], [-4.0]])
    assert loss(torch.tensor([[3.0], [-4.0]], dtype=torch.float64), torch.tensor([0, 1])).total == 0.5
    assert loss.centres_CD.tolist() == [[1.5], [-4]]


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


def test_combined_keeps_the_parts_of_terms_of_one_name_apart():
    """Parts of terms with the same name keep separate curves."""
    terms = [
        {"name": "softmax"},
        {"name": "sgsl", "options": {"gate": 1e9}},
        {"name": "softmax", "weight": 3.0, "options": {"label_smoothing": 0.2}},
        {"name": "softmax"},
    ]
    output = build(("combined", {"terms": terms}))(EMBEDDINGS, LABELS)
    assert list(output.parts) == ["softmax.softmax", "sgsl.softmax", "sgsl.sgsl", "softmax_2.softmax", "softmax_3.softmax"]
    softmax, *of_sgsl, second, third = output.parts.values()
    torch.testing.assert_close(output.total, softmax + sum(of_sgsl) + 3 * second + third)
    assert len({float(softmax), float(second), float(third)}) == 3


def test_combined_hands_the_run_s_draws_on():
    term, alone = {"name": "tuplet_margin"}, build(("tuplet_margin", {}))
    totals = [loss(EMBEDDINGS, LABELS, torch.Generator().manual_seed(5)).total for loss in (build(("combined", {"terms": [term]})), alone)]
    assert totals[0] == totals[1]


PARTS = {  # parts shown as curves, and the option that weighs each in the total
    "softmax": {"softmax": None},
    "normalised_softmax": {"softmax": None},
    "softtriple": {"softmax": None, "regulariser": "regulariser_weight"},
    "hardtriple": {"softmax": None, "regulariser": "regulariser_weight"},
    "heated_up_softmax": {"softmax": None},
    "discriminative": {"discriminative": None},
    "tuplet_margin": {"tuplet": None, "pair_variation": "variance_weight"},
    "sgsl": {"softmax": None, "sgsl": "weight"},
    "triplet_semi_hard": {"triplet": None},
    "triplet_batch_hard": {"triplet": None},
    "triplet_global": {"triplet": None, "global": "global_weight"},
    "contrastive": {"contrastive": None},
    "proxy_nca": {"proxy_nca": None},
    "center_loss": {"center": None},
    "ring_loss": {"ring": None},
    "l2_constrained_softmax": {"softmax": None},
}


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "combined"], ids=case_id)
def test_the_parts_of_a_loss_have_their_names_and_add_up_to_it(case):
    loss = build(case)
    output = loss(EMBEDDINGS.clone().requires_grad_(), LABELS, torch.Generator().manual_seed(0))
    weights = {part: getattr(loss.config, option) if option else 1.0 for part, option in PARTS[case[0]].items()}
    if getattr(loss.config, "num_centres", 0) == 1 or getattr(loss.config, "regulariser_weight", 1) == 0:
        del weights["regulariser"]
    assert set(output.parts) == set(weights)
    assert not {"loss", "epoch", "step", "learning_rate_factor"} & set(output.parts), "a part would replace it in the history"
    assert not any(value.requires_grad for value in output.parts.values())
    torch.testing.assert_close(output.total.detach(), sum(weights[part] * value for part, value in output.parts.items()))


@pytest.mark.parametrize(("name", "options", "centres"), [("normalised_softmax", {}, 100), ("softtriple", {"num_centres": 4}, 400)])
def test_centres_start_uniformly_up_to_the_root_of_their_number(name, options, centres):
    values = next(build((name, options), num_classes=100, dim=50).parameters()).detach() * centres**0.5
    assert values.abs().max() <= 1
    torch.testing.assert_close(
        values.quantile(torch.tensor([0.05, 0.25, 0.5, 0.95]).double()), torch.tensor([-0.9, -0.5, 0, 0.9]).double(), rtol=0, atol=0.05
    )


@pytest.mark.parametrize("learn_radius", [True, False])
def test_the_radius_is_learned_only_where_asked_for(learn_radius):
    loss = build(("l2_constrained_softmax", {"learn_radius": learn_radius, "radius": 7.0}))
    loss(EMBEDDINGS, LABELS).total.backward()
    assert (loss.radius.grad is not None) == learn_radius
    assert loss.radius == 7


def test_sgsl_joins_at_its_gate_exactly():
    at_gate = build(("sgsl", {}))(EMBEDDINGS, LABELS).parts["softmax"].item()
    assert build(("sgsl", {"gate": at_gate}))(EMBEDDINGS, LABELS).parts["sgsl"] > 0


def test_sgsls_dropout_is_the_softmaxs_alone_and_the_steps_own():
    """Dropout zeroes half of the inputs of the classifier and doubles the others; SGSL compares the whole embeddings."""
    loss, plain = build(("sgsl", {"dropout": 0.5, "gate": 1e9})), build(("sgsl", {"gate": 1e9}))
    embeddings_ND, labels_N = torch.randn(400, 5).double(), torch.arange(400) % 5
    first, again, other = (loss(embeddings_ND, labels_N, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert first.total == again.total != other.total
    assert first.parts["sgsl"] == plain(embeddings_ND, labels_N).parts["sgsl"]
    seen_ND = drop_features(embeddings_ND, 0.5, torch.Generator().manual_seed(3))
    assert first.parts["softmax"] == plain(seen_ND, labels_N).parts["softmax"]
    dropped_ND = seen_ND == 0
    assert dropped_ND.double().mean().item() == pytest.approx(0.5, abs=0.05)
    assert torch.equal(seen_ND[~dropped_ND], 2 * embeddings_ND[~dropped_ND])


def test_a_softmax_on_a_sphere_drops_features_behind_the_normalisation():
    """Boudiaf's dropout is the layer before the classifier, so the classifier's inputs no longer have a constant norm."""
    loss, plain = build(("l2_constrained_softmax", {"dropout": 0.5})), build(("l2_constrained_softmax", {}))
    embeddings_ND, labels_N = torch.randn(40, 5).double(), torch.arange(40) % 5
    seen_ND = drop_features(40 * functional.normalize(embeddings_ND), 0.5, torch.Generator().manual_seed(3))
    expected = functional.cross_entropy(loss.classifier(seen_ND), labels_N)
    torch.testing.assert_close(loss(embeddings_ND, labels_N, torch.Generator().manual_seed(3)).total, expected)
    assert plain(embeddings_ND, labels_N).total != expected


def test_centroids_of_a_k_means_are_those_of_their_seed():
    first, again, other = (build(("discriminative", {"centroids": "kmeans", "centroid_seed": seed})).centroids_CD for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_run_depends_on_the_modules_of_its_loss_and_of_its_terms():
    assert loss_modules("softtriple", {}) == {"dml_core.losses.softtriple"}
    assert loss_modules("pml:ArcFaceLoss", {}) == {"dml_core.losses.pml"}
    names = {f"dml_core.losses.{name}" for name in ("combined", "heated_up_softmax", "triplet_batch_hard")}
    assert loss_modules("combined", COMBINED) == names
    assert loss_modules("combined", {"terms": [{"name": "combined", "options": COMBINED}]}) == names
    malformed = (None, 3, {"name": "softmax"}, ["softmax"], [{"weight": 1}], [{"name": 5}], [{"name": "combined", "options": None}])
    for unfinished in ({}, {"terms": [{"name": "combined"}]}, *({"terms": terms} for terms in malformed)):
        assert loss_modules("combined", unfinished) == {"dml_core.losses.combined"}, "refused when the loss is built, not here"
