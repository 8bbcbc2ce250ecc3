"""Measurements of training images and history: compared with single images, loops over pairs and hand calculations."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dml_core.config import Config
from dml_core.data.store.embedded import EmbeddedImages
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import EvaluationError
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.separability import class_separability
from dml_core.measurements import contract, last_softmax, pair_cosines, training_separability
from dml_core.measurements.contract import FinishedRun
from dml_core.training.loop import build_system
from tests.conftest import small_training
from tests.one_view import plain_view as view_of


@pytest.fixture
def run(packed: Path) -> FinishedRun:
    return finished(packed)


def finished(packed: Path, history: list[dict[str, float]] | None = None, **training: Any) -> FinishedRun:
    config = small_training(**training)
    side = EmbeddedImages("test", PackedDataset(packed, "test"), np.eye(3, dtype=np.float32), np.arange(3))
    load = lambda: build_system(config, 4, 0, torch.device("cpu")).eval()  # noqa: E731
    return FinishedRun("run", config, 0, packed, side, side, history or [], {}, load)


def test_training_images_are_embedded_one_by_one_alike(run: FinishedRun, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "BATCH_SIZE", 7)  # several batches, of which the last is short
    dataset, model = PackedDataset(packed, "train"), run.system.model
    with torch.no_grad():
        alone = [model.embed(view_of(dataset.image(index), run.training.transform)[None])[0].numpy() for index in range(len(dataset))]
    np.testing.assert_allclose(run.training_images.embeddings, alone, rtol=1e-4, atol=1e-5)
    assert run.training_images.labels.tolist() == dataset.labels.tolist()


@pytest.mark.parametrize("block_rows", [1, 5, 36, 100])
def test_pairs_are_all_pairs_each_once(run: FinishedRun, monkeypatch: pytest.MonkeyPatch, block_rows: int) -> None:
    monkeypatch.setattr(pair_cosines, "BLOCK_ROWS", block_rows)
    embeddings = np.random.default_rng(0).normal(1.0, size=(36, 5))
    labels = run.training_images.labels
    by_kind: dict[bool, list[float]] = {True: [], False: []}
    for one, other in itertools.combinations(range(36), 2):
        cosine = embeddings[one] @ embeddings[other] / np.linalg.norm(embeddings[one]) / np.linalg.norm(embeddings[other])
        by_kind[bool(labels[one] == labels[other])].append(cosine)
    positive, negative = np.array(by_kind[True]), np.array(by_kind[False])
    too_far, too_near = 0.9 * positive.mean() - positive, negative - 1.1 * negative.mean()
    variation = np.mean(np.maximum(too_far, 0) ** 2) + np.mean(np.maximum(too_near, 0) ** 2)
    assert pair_cosines.gap_and_variation(embeddings, labels, 0.1) == pytest.approx((positive.mean() - negative.mean(), variation))


def test_the_pairs_are_those_of_the_runs_training_images(run: FinishedRun) -> None:
    scored = run.training_images
    expected = pair_cosines.gap_and_variation(scored.embeddings, scored.labels, 0.01)
    assert pair_cosines.measure(run, pair_cosines.Options(), Path()) == dict(zip(pair_cosines.METRICS, expected, strict=True))


def test_the_gap_and_the_variation_by_hand() -> None:
    # cosines 1 and 0.6 of positive pairs, 0, 0, 0.8 and 0.8 of negative ones: means 0.8 and 0.4; 0.99 * 0.8 = 0.792, 1.01 * 0.4 = 0.404
    embeddings = np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [1.6, 1.2]])
    found = pair_cosines.gap_and_variation(embeddings, np.array([0, 0, 1, 1]), 0.01)
    assert found == pytest.approx((0.8 - 0.4, (0.0 + 0.192**2) / 2 + (0.0 + 0.0 + 2 * 0.396**2) / 4))


def test_a_kind_without_pairs_has_no_gap() -> None:
    assert all(map(math.isnan, pair_cosines.gap_and_variation(np.eye(2), np.array([0, 1]), 0.01)))


def test_the_training_csc_is_the_evaluators_of_the_training_images(run: FinishedRun) -> None:
    scored = run.training_images
    expected = class_separability(as_points(scored.embeddings, "euclidean"), scored.labels)["csc"]
    assert training_separability.measure(run, Config(), Path()) == {"csc_train": expected}


def test_training_classes_without_a_spread_have_no_csc(run: FinishedRun) -> None:
    """A collapsed network maps all images to one point."""
    run.__dict__["training_images"] = replace(run.training_images, embeddings=np.ones_like(run.training_images.embeddings))
    assert training_separability.measure(run, Config(), Path()) == {}


def test_the_last_softmax_is_the_mean_of_the_last_epochs_steps(packed: Path) -> None:
    history = [{"epoch": epoch, "softmax": value} for epoch, value in ((0, 9.0), (1, 5.0), (2, 1.0), (2, 2.0))]
    run = finished(packed, history, num_epochs=3)
    assert last_softmax.measure(run, Config(), Path()) == {"last_softmax": 1.5}


@pytest.mark.parametrize("history", [[], [{"epoch": 0, "triplet": 1.0}]])
def test_a_run_without_a_softmax_loss_is_refused(packed: Path, history: list[dict[str, float]]) -> None:
    with pytest.raises(EvaluationError, match="run: the loss 'normalised_softmax' has no softmax part in 1 epochs"):
        last_softmax.measure(finished(packed, history, num_epochs=1), Config(), Path())
