"""Recall@1 on held-out classes after each epoch: the right number, and no effect on the training."""

import gc
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.split_config import ValidationConfig
from dml_core.epochs import RECALL
from dml_core.evaluation.evaluator import evaluate
from dml_core.training import validation
from dml_core.training.history import Progress, read_history
from dml_core.training.loop import build_system, fit
from dml_core.training.validation import METRIC, HeldOutRecall, ScoredImages, bounded_rows, scorers
from tasks.scores.evaluation import recall_by_epoch
from tests.conftest import MODEL, SYNTHETIC_OPTIONS, small_training
from tests.one_view import plain_view
from tests.training.stopping import checkpoint_of
from tests.workers import spawn

CPU = torch.device("cpu")
CONFIG = small_training(model={**MODEL, "head": {"kind": "bn", "embedding_dim": 8}}, num_epochs=2)


def test_a_watched_run_ends_with_the_bytes_of_an_unwatched_one(packed: Path, tmp_path: Path) -> None:
    heard: list[Progress] = []
    training, held_out = PackedDataset(packed, "train"), PackedDataset(packed, "test")
    fit(CONFIG, training, 0, tmp_path / "alone", CPU)
    watched = fit(
        CONFIG,
        training,
        0,
        tmp_path / "watched",
        CPU,
        report=heard.append,
        validate=HeldOutRecall(ScoredImages(CPU), held_out, CONFIG.transform),
    )
    one, other = checkpoint_of(tmp_path / "alone"), checkpoint_of(tmp_path / "watched")
    assert all(torch.equal(value, other["system"][name]) for name, value in one["system"].items())
    assert str(one["optimiser"]) == str(other["optimiser"])
    # The history differs only by the score in the last step of each epoch.
    rows = read_history(tmp_path / "watched")
    scores = [row.pop(METRIC) for row in rows if METRIC in row]
    assert rows == read_history(tmp_path / "alone")
    assert [message.metrics[METRIC] for message in heard if message.epoch_ended] == scores
    assert len(scores) == 2
    # By hand: the nearest other image of each image, by cosine.
    with torch.no_grad():
        points = watched.model.embed(torch.stack([plain_view(held_out.image(index), CONFIG.transform) for index in range(len(held_out))]))
    cosines = (points @ points.T).fill_diagonal_(-2)
    assert scores[-1] == pytest.approx((held_out.labels[cosines.argmax(dim=1)] == held_out.labels).mean())


@pytest.mark.parametrize(("every", "measured"), [(1, [1, 2, 3]), (2, [2, 3]), (9, [3])])
def test_a_curve_has_training_and_test_images_and_changes_nothing(packed: Path, tmp_path: Path, every: int, measured: list[int]) -> None:
    plain = CONFIG.model_copy(update={"num_epochs": 3})
    curved = plain.model_copy(update={"recall_every_epochs": every})
    training = PackedDataset(packed, "train")
    fit(plain, training, 0, tmp_path / "plain", CPU)
    trained = fit(curved, training, 0, tmp_path / "curved", CPU, score_curve=scorers(packed, curved, ScoredImages(CPU))[2])
    one, other = checkpoint_of(tmp_path / "plain"), checkpoint_of(tmp_path / "curved")
    assert all(torch.equal(value, other["system"][name]) for name, value in one["system"].items())
    curves = recall_by_epoch(read_history(tmp_path / "curved"))
    assert {role: list(curve) for role, curve in curves.items()} == {"train": measured, "test": measured}
    assert recall_by_epoch(read_history(tmp_path / "plain")) == {}
    for role, curve in curves.items():  # by hand: the nearest other image of each image, by cosine
        images = PackedDataset(packed, role)
        with torch.no_grad():
            points = trained.model.embed(torch.stack([plain_view(images.image(index), CONFIG.transform) for index in range(len(images))]))
        cosines = (points @ points.T).fill_diagonal_(-2)
        assert curve[3] == pytest.approx((images.labels[cosines.argmax(dim=1)] == images.labels).mean())


def test_held_out_classes_are_not_in_the_curve_of_the_training_images(packed: Path) -> None:
    config = CONFIG.model_copy(update={"recall_every_epochs": 1, "validation": ValidationConfig(share=0.5)})
    images = ScoredImages(CPU)
    scorers(packed, config, images)
    held_out, training, _ = images._datasets.parts
    assert training.class_names
    assert set(training.class_names).isdisjoint(held_out.class_names)


@pytest.mark.parametrize("num_loader_workers", [0, 1])
def test_neither_random_streams_nor_weights_nor_averages_are_touched(packed: Path, num_loader_workers: int) -> None:
    model = build_system(CONFIG, 4, 0, CPU).train().model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    watch = HeldOutRecall(ScoredImages(CPU, num_loader_workers), PackedDataset(packed, "test"), CONFIG.transform)
    assert 0 <= watch(model)[METRIC] <= 1
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_loader_processes_live_from_epoch_to_epoch(packed: Path) -> None:
    gc.collect()  # collects loaders of other tests
    model, before = build_system(CONFIG, 4, 0, CPU).model, set(multiprocessing.active_children())
    watch = HeldOutRecall(ScoredImages(CPU, 1), PackedDataset(packed, "test"), CONFIG.transform)
    scores = [watch(model) for _ in range(2)]
    started = set(multiprocessing.active_children()) - before
    assert scores[0] == scores[1]
    assert len(started) == 1
    assert watch(model) == scores[0]
    assert set(multiprocessing.active_children()) - before == started
    del watch
    gc.collect()
    assert not set(multiprocessing.active_children()) & started


def test_images_that_are_decoded_on_the_device_are_scored_alike(packed: Path) -> None:
    model, datasets = build_system(CONFIG, 4, 0, CPU).model, [PackedDataset(packed, role) for role in ("train", "test")]
    scores = {}
    for decoder in ("cpu", "nvjpeg"):
        images, transform = ScoredImages(CPU), CONFIG.transform.model_copy(update={"decoder": decoder})
        scores[decoder] = [HeldOutRecall(images, dataset, transform)(model) for dataset in datasets]
    assert scores["nvjpeg"] == scores["cpu"]


def test_the_scorers_of_a_run_share_their_loader_processes(packed: Path) -> None:
    """A GPU would otherwise have the processes of four datasets at the same time."""
    gc.collect()  # collects loaders of other tests
    changes = {"validation": ValidationConfig(share=0.5), "recall_every_epochs": 1, "keep_epochs": ("oracle",)}
    config, model, before = CONFIG.model_copy(update=changes), build_system(CONFIG, 4, 0, CPU).model, set(multiprocessing.active_children())
    alone = [scorer(model) for scorer in scorers(packed, config, ScoredImages(CPU))]
    images = ScoredImages(CPU, num_loader_workers=1)
    watched = scorers(packed, config, images)
    assert [scorer(model) for scorer in watched] == alone
    assert len({*alone[0], *alone[1], *alone[2]}) == 4
    assert len(set(multiprocessing.active_children()) - before) == 1
    images.close()
    assert set(multiprocessing.active_children()) == before


def score_in_parts(rank: int, packed: Path, folder: Path) -> None:
    seen, of_all = [], validation.score_queries
    validation.score_queries = lambda gallery, queries, *more: seen.append(len(queries)) or of_all(gallery, queries, *more)
    model = build_system(CONFIG, 4, 0, CPU).model
    found = HeldOutRecall(ScoredImages(CPU), PackedDataset(packed, "test"), CONFIG.transform)(model)
    (folder / f"{rank}.json").write_text(json.dumps([found[METRIC], seen]))


@pytest.mark.slow
def test_workers_share_the_scoring_and_agree_with_the_evaluator(packed: Path, tmp_path: Path) -> None:
    spawn(score_in_parts, 3, packed, tmp_path)
    recalls, seen = zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)), strict=True)
    images, model = PackedDataset(packed, "test"), build_system(CONFIG, 4, 0, CPU).eval().model
    with torch.no_grad():
        points = model.embed(torch.stack([plain_view(images.image(index), CONFIG.transform) for index in range(len(images))]))
    assert set(recalls) == {evaluate(points, images.labels)["recall@1"]}
    assert [number for worker in seen for number in worker] == [len(images) // 3] * 3


@pytest.mark.parametrize("value", [float("nan"), 0.0, 1e9])
def test_what_cannot_be_scored_is_left_out(packed: Path, value: float) -> None:
    """Infinite weights after a last step are reported by the next step, with the loss's message; zero and huge ones may pass."""
    model = build_system(CONFIG, 4, 0, CPU).model
    for parameter in model.parameters():
        parameter.data.fill_(value)
    assert HeldOutRecall(ScoredImages(CPU), PackedDataset(packed, "test"), CONFIG.transform)(model) == {}


def test_an_epoch_s_validation_is_bounded_by_whole_classes() -> None:
    labels = np.array([0, 0, 2, 1, 2, 1, 3, 2])
    assert bounded_rows(labels, 8).tolist() == list(range(8))
    assert bounded_rows(labels, 7).tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert bounded_rows(labels, 1).tolist() == [0, 1, 3, 5]


def test_a_test_with_queries_is_scored_against_its_gallery_all_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the final evaluation; the bound on the number of validation images does not apply."""
    monkeypatch.setattr(validation, "MAX_IMAGES", 3)
    options = {**SYNTHETIC_OPTIONS, "layout": "inshop"}
    materialise("synthetic", options, tmp_path / "raw")
    prepare("synthetic", tmp_path / "raw", tmp_path / "packed", options)
    config = CONFIG.model_copy(update={"keep_epochs": ("oracle",)})
    _, tested, _ = scorers(tmp_path / "packed", config, ScoredImages(CPU))
    assert tested is not None
    model = build_system(config, 4, 0, CPU).eval().model
    queries, gallery = (PackedDataset(tmp_path / "packed", role) for role in ("query", "gallery"))
    points = []
    with torch.no_grad():
        for role in (queries, gallery):
            views = [plain_view(role.image(index), config.transform) for index in range(len(role))]
            points.append(model.embed(torch.stack(views)).double())
    hits = gallery.labels[(points[0] @ points[1].T).argmax(dim=1)] == queries.labels
    assert tested(model) == {RECALL["oracle"]: pytest.approx(hits.mean())}
    assert 0 < hits.mean() < 1
