"""Heated-up softmax: the heating schedule, its effects, and the initial classifier."""

import pytest
import torch
from loss_cases import build
from torch.nn import functional

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.losses.contract import Needs
from dml_core.losses.registry import parse_loss_options
from dml_core.models.heads import HeadConfig, build_head


def course(num_epochs, **options):
    """Return (alpha, learning-rate factor) of every epoch."""
    loss = build(("heated_up_softmax", options))
    values = []
    for epoch in range(num_epochs):
        loss.start_epoch(epoch, num_epochs)
        values.append((loss.alpha, loss.learning_rate_factor))
    return values


def test_released_schedule_is_61_cold_and_19_heated_epochs_of_80():
    assert course(80) == [(16.0, 1.0)] * 61 + [(4.0, 0.1)] * 19


def test_without_a_heated_alpha_nothing_changes():
    assert course(80, heated_alpha=None) == [(16.0, 1.0)] * 80


def test_gentle_schedule_ends_where_the_step_ends_in_equal_ratios():
    values = course(8, schedule="gentle", heat_from=0.5)
    assert values[:4] == [(16.0, 1.0)] * 4
    expected = [(16 * 0.25 ** (i / 4), 0.1 ** (i / 4)) for i in (1, 2, 3, 4)]
    torch.testing.assert_close(torch.tensor(values[4:]), torch.tensor(expected))


def test_the_epoch_alone_decides_so_a_resumed_run_is_the_same():
    loss = build(("heated_up_softmax", {}))
    assert (loss.alpha, loss.learning_rate_factor) == (16.0, 1.0)
    for epoch in (70, 10, 61):
        loss.start_epoch(epoch, 80)
        assert loss.alpha == (4.0 if epoch >= 61 else 16.0)


def test_alpha_scales_the_logits():
    loss, embeddings_ND, labels_N = build(("heated_up_softmax", {"bias": False})), torch.eye(5).double(), torch.arange(5)
    logits_NC = functional.normalize(loss.classifier.weight).T
    for epoch, alpha in ((0, 16.0), (79, 4.0)):
        loss.start_epoch(epoch, 80)
        torch.testing.assert_close(loss(embeddings_ND, labels_N).total, functional.cross_entropy(alpha * logits_NC, labels_N))


@pytest.mark.parametrize(
    ("variant", "last_alpha"), [("SM", None), ("LN", 16.0), ("BN", 16.0), ("HLN", 4.0), ("HBN", 4.0)], ids=lambda value: str(value)
)
def test_the_five_variants_of_the_paper(variant, last_alpha):
    """The loss sees unnormalised (SM), unit-length (LN) or variance-1/k (BN) embeddings; H variants end with the heated alpha."""
    kind = {"kind": "bn"} if variant.endswith("BN") else {"normalise_in_training": variant != "SM"}
    head = build_head(parse(HeadConfig, {"embedding_dim": 5, **kind}, "head"), 12, 7).double()
    seen_ND = head(3 + torch.randn(400, 12, dtype=torch.float64))
    unit_length = torch.allclose(seen_ND.norm(dim=1), torch.ones(400).double())
    unit_variance = torch.allclose(seen_ND.var(dim=0, correction=0), torch.full((5,), 1 / 5).double(), rtol=0.05)
    assert (unit_length, unit_variance) == (variant.endswith("LN"), variant.endswith("BN"))
    if last_alpha is None:
        assert not hasattr(build(("softmax", {})), "alpha")
    else:
        loss = build(("heated_up_softmax", {} if variant.startswith("H") else {"heated_alpha": None}))
        loss.start_epoch(79, 80)
        assert loss.alpha == last_alpha


@pytest.mark.parametrize("name", ["heated_up_softmax", "softmax"])
def test_better_init_points_each_weight_at_its_class_mean(name):
    loss = build((name, {"better_init": True}))
    embeddings_ND, labels_N = torch.randn(20, 5).double(), torch.arange(20) % 5
    loss.initialise(embeddings_ND, labels_N)
    means_CD = torch.stack([embeddings_ND[labels_N == c].mean(0) for c in range(5)])
    torch.testing.assert_close(loss.classifier.weight.detach(), functional.normalize(means_CD))


@pytest.mark.parametrize("name", ["heated_up_softmax", "softmax"])
@pytest.mark.parametrize("better_init", [True, False])
def test_embeddings_are_asked_for_only_by_better_init(name, better_init):
    assert build((name, {"better_init": better_init})).needs == Needs(initial_embeddings=better_init)


@pytest.mark.parametrize(("inside", "factor"), [(True, 16.0), (False, 1.0)])
def test_a_bias_inside_alpha_moves_alpha_times_as_fast(inside, factor):
    """The gradient of b_m is p_m - q_m in the released logits, and alpha times that when the bias is inside alpha (equation 1)."""
    loss = build(("heated_up_softmax", {"bias_inside_alpha": inside}))
    torch.nn.init.zeros_(loss.classifier.bias)
    embeddings_ND, labels_N = torch.randn(20, 5).double(), torch.arange(20) % 5
    loss(embeddings_ND, labels_N).total.backward()
    probabilities_NC = (16 * embeddings_ND @ functional.normalize(loss.classifier.weight).T).softmax(dim=1)
    expected_C = (probabilities_NC - functional.one_hot(labels_N)).mean(dim=0)
    torch.testing.assert_close(loss.classifier.bias.grad, factor * expected_C)


@pytest.mark.parametrize("name", ["heated_up_softmax", "softmax"])
@pytest.mark.parametrize(("initial", "norm", "has_bias"), [("uniform", 0.58, True), ("unit_norm", 1.0, False)])
def test_where_the_classifier_starts(name, initial, norm, has_bias):
    classifier = build((name, {"initial": initial}), num_classes=98, dim=64).classifier
    assert classifier.weight.norm(dim=1).mean().item() == pytest.approx(norm, abs=0.03)
    assert bool(classifier.bias.any()) == has_bias


def test_heating_never_raises_alpha() -> None:
    with pytest.raises(ConfigError, match="heated_alpha 17 is above alpha 16: that cools"):
        parse_loss_options("heated_up_softmax", {"alpha": 16, "heated_alpha": 17})
    assert parse_loss_options("heated_up_softmax", {"alpha": 16, "heated_alpha": 16}).alpha == 16
