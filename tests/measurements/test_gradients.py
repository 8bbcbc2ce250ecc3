"""Gradients at single embeddings: compared with autograd through the losses, and with the paper's limits."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.data.store.split_config import ValidationConfig
from dml_core.data.store.splits import open_role
from dml_core.errors import EvaluationError
from dml_core.losses.registry import build_loss
from dml_core.measurements import gradient_over_alpha, gradient_over_norm
from dml_core.measurements.classifier import Classifier, choose_samples, classifier_of, unit_rows
from dml_core.measurements.contract import FinishedRun

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 5, 40)


def finished(loss: torch.nn.Module, embeddings: np.ndarray, labels: np.ndarray = LABELS, name: str = "softmax") -> FinishedRun:
    """Return a run with this loss and these embeddings, without images."""
    scored: Any = EmbeddedImages("train", None, embeddings.astype(np.float32), labels)
    training: Any = SimpleNamespace(loss=SimpleNamespace(name=name), validation=None, num_epochs=80)
    run: Any = FinishedRun("a run", training, 0, Path(), scored, scored, [], {}, lambda: SimpleNamespace(loss=loss))  # type: ignore[return-value, arg-type]
    return run


@pytest.fixture(autouse=True)
def _the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the draws for any order of tests: with few samples, not every draw shows the expected effect."""
    torch.manual_seed(1)
    monkeypatch.setattr(sys.modules[__name__], "RNG", np.random.default_rng(1))


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable pictures, for which there are no images; `tests/figures` tests them."""
    for module in (gradient_over_alpha, gradient_over_norm):
        monkeypatch.setattr(module, "draw_samples", lambda *_: None)


BIASES: list[dict[str, bool]] = [{"bias": False}, {"bias_inside_alpha": True}, {"bias_inside_alpha": False}]
CLASSIFIERS: list[tuple[str, float, dict[str, Any]]] = [
    *(("heated_up_softmax", alpha, {"alpha": alpha, "heated_alpha": None, **bias}) for alpha in (0.25, 4.0, 64.0) for bias in BIASES),
    *(
        ("heated_up_softmax", 4.0, {"alpha": 16, "heated_alpha": 4, "schedule": how, **bias})
        for how in ("step", "gentle")
        for bias in BIASES
    ),
    ("heated_up_softmax", 16.0, {"alpha": 16, "heated_alpha": 4, "heat_from": 1.0, "bias_inside_alpha": False}),
    ("softmax", 1.0, {}),
    ("sgsl", 1.0, {"weight": 0, "label_smoothing": 0}),
]


def loss_at_the_end(name: str, options: dict[str, Any]) -> torch.nn.Module:
    """Return a loss with random biases, of the size that those outside of alpha grow to, as in the last of 80 epochs."""
    loss = build_loss(name, options, 5, 3).double()
    for parameter, value in loss.named_parameters():
        if parameter.endswith("bias"):
            value.data.copy_(3 * torch.randn(len(value)))
    loss.start_epoch(79, 80)
    return loss


@pytest.mark.parametrize(("name", "alpha", "options"), CLASSIFIERS)
def test_the_gradient_is_autograds(name: str, alpha: float, options: dict[str, Any]) -> None:
    loss = loss_at_the_end(name, options)
    units_ND = torch.tensor(unit_rows(RNG.standard_normal((40, 3))), requires_grad=True)
    classifier = classifier_of(finished(loss, units_ND.detach().numpy()))
    (expected_ND,) = torch.autograd.grad(40 * loss(units_ND, torch.tensor(LABELS)).total, units_ND)
    found = classifier.gradient_norms(units_ND.detach().numpy(), LABELS, alpha)
    np.testing.assert_allclose(found, expected_ND.norm(dim=1).numpy(), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(("name", "alpha", "options"), CLASSIFIERS)
def test_an_embedding_is_classified_as_the_class_with_the_smallest_loss(name: str, alpha: float, options: dict[str, Any]) -> None:
    loss = loss_at_the_end(name, options)
    units_ND = unit_rows(RNG.standard_normal((40, 3)))
    classifier = classifier_of(finished(loss, units_ND))
    losses_NC = np.array(
        [[float(loss(torch.tensor(unit_D)[None], torch.tensor([label])).total) for label in range(5)] for unit_D in units_ND]
    )
    for label in range(5):
        is_right = classifier.margins(units_ND, np.full(40, label)) > 0
        np.testing.assert_array_equal(is_right, losses_NC.argmin(axis=1) == label)


def test_two_opposite_classes_by_hand() -> None:
    """With w = (1, 0) and (-1, 0) and f = (1, 0), p of the other class is 1 / (1 + e^(2 alpha)), and the gradient's norm 2 alpha p."""
    classifier = Classifier(np.array([[1.0, 0.0], [-1.0, 0.0]]), np.zeros(2))
    embedding = np.array([[1.0, 0.0]])
    for alpha in (0.5, 2.0):
        assert classifier.gradient_norms(embedding, np.array([0]), alpha) == pytest.approx(2 * alpha / (1 + np.exp(2 * alpha)))
        assert classifier.gradient_norms(embedding, np.array([1]), alpha) == pytest.approx(2 * alpha / (1 + np.exp(-2 * alpha)))
    assert classifier.margins(embedding, np.array([0])) == pytest.approx(2.0)
    assert classifier.margins(embedding, np.array([1])) == pytest.approx(-2.0)


def test_samples_are_chosen_by_their_margins_alone() -> None:
    margins = np.array([0.5, -3.0, 0.1, -1.0, 0.0, 0.9, -2.0, 0.3, 0.7, 0.2])
    assert margins[choose_samples(margins, "hard")].tolist() == [-3.0, -1.0, 0.0]
    assert margins[choose_samples(margins, "easy")].tolist() == [0.1, 0.5, 0.9]
    assert choose_samples(np.array([1.0, 2.0]), "hard").tolist() == []
    assert choose_samples(np.array([1.0, -2.0]), "hard").tolist() == [1]


def test_scores_of_a_run_follow_section_3_1(tmp_path: Path) -> None:
    """The gradient of hard samples grows with alpha without bound; that of easy ones vanishes for small and for large alpha."""
    loss = build_loss("heated_up_softmax", {"bias": False}, 5, 3)
    run = finished(loss, RNG.standard_normal((40, 3)), name="heated_up_softmax")
    hard = gradient_over_alpha.measure(run, gradient_over_alpha.Options(samples="hard"), tmp_path)
    easy = gradient_over_alpha.measure(run, gradient_over_alpha.Options(samples="easy"), tmp_path)
    assert set(hard) == set(easy) == set(gradient_over_alpha.METRICS)
    assert hard["gradient_norm@1024"] > 10 * hard["gradient_norm@64"] > 20 * hard["gradient_norm@16"]
    assert max(easy["gradient_norm@0.25"], easy["gradient_norm@1024"]) < easy["gradient_norm@4"]
    kept = np.load(tmp_path / "gradient_over_alpha.npz")
    assert kept["norms"].shape == (3, len(kept["alphas"]))
    assert (kept["margins"] > 0).all(), "the easy ones, which were measured last"


def test_scores_of_a_run_follow_section_3_4(tmp_path: Path) -> None:
    """As the norm grows, the gradient of a hard sample approaches a constant, that of an easy one 0."""
    run = finished(build_loss("softmax", {"bias": False}, 5, 3), 5 * RNG.standard_normal((40, 3)))
    hard = gradient_over_norm.measure(run, gradient_over_norm.Options(samples="hard"), tmp_path)
    easy = gradient_over_norm.measure(run, gradient_over_norm.Options(samples="easy"), tmp_path)
    assert hard["gradient_to_limit@100x"] == pytest.approx(1.0, abs=0.02)
    assert easy["gradient_norm@100x"] < 0.02 < easy["gradient_norm@0.1x"]
    assert not any(name.startswith("gradient_to_limit") for name in easy)


def test_a_run_without_a_hard_sample_has_no_score(tmp_path: Path) -> None:
    loss = build_loss("softmax", {"bias": False}, 5, 5)
    loss.get_parameter("classifier.weight").data = torch.eye(5)
    run = finished(loss, np.eye(5)[LABELS])
    for module in (gradient_over_alpha, gradient_over_norm):
        assert module.measure(run, module.Options(samples="hard"), tmp_path) == {}
        assert len(module.measure(run, module.Options(samples="easy"), tmp_path)) > 3


@pytest.mark.parametrize("name", ["contrastive", "normalised_softmax"])
def test_a_loss_that_is_not_supported_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(EvaluationError, match=rf"support the losses softmax, heated_up_softmax and sgsl, not '{name}'$"):
        classifier_of(finished(build_loss(name, {}, 5, 3), np.ones((40, 3)), name=name))


@pytest.mark.parametrize(("role", "validation"), [("test", None), ("validation", ValidationConfig(share=0.5))])
def test_classes_of_another_role_are_refused_although_their_numbers_are_those_of_trained_ones(
    role: str, validation: ValidationConfig | None, packed: Path
) -> None:
    dataset = open_role(packed, role, validation)
    trained = open_role(packed, "train", validation)
    assert set(dataset.labels) <= set(trained.labels)
    scored = EmbeddedImages(role, dataset, np.ones((len(dataset), 3), np.float32), dataset.labels)
    loss = build_loss("softmax", {}, len(trained.class_names), 3)
    run = replace(finished(loss, np.ones((40, 3))), dataset=packed, queries=scored, gallery=scored)
    run.training.validation = validation  # type: ignore[misc]
    with pytest.raises(EvaluationError, match="classes that the classifier was not trained on; score the training images"):
        classifier_of(run)


def test_rows_of_zeros_are_refused() -> None:
    with pytest.raises(EvaluationError, match="1 rows of zeros"):
        unit_rows(np.array([[0.0, 0.0], [1.0, 0.0]]))
