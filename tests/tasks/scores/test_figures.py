"""Queries shown in a run's figures, and the search of their neighbours."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dml_core.data.prepare import prepare
from dml_core.data.store.embedded import EmbeddedImages
from dml_core.data.store.packed import PackedDataset
from dml_core.evaluation.config import EvaluationConfig, Metric
from dml_core.evaluation.evaluator import ClassRecall, evaluate
from dml_core.evaluation.retrieval.outcomes import query_outcomes
from tasks.scores import figures
from tasks.scores.figures import (
    MAX_QUERIES,
    NUM_NEIGHBOURS,
    choose_queries,
    draw_curves,
    draw_figures,
    look_up,
    rows_to_draw,
)


def test_up_to_a_thousand_queries_are_all_looked_at() -> None:
    assert choose_queries(np.zeros(MAX_QUERIES, dtype=int), 0).tolist() == list(range(MAX_QUERIES))


@pytest.mark.parametrize(("num_classes", "per_class", "expected"), [(4, 500, 250), (100, 60, 25), (5000, 3, 3)])
def test_of_more_queries_whole_shares_of_classes_are(num_classes: int, per_class: int, expected: int) -> None:
    labels = np.tile(np.arange(num_classes), per_class)
    chosen = choose_queries(labels, 0)
    assert len(chosen) == len(set(chosen.tolist())) == MAX_QUERIES
    assert sorted(np.unique(labels[chosen], return_counts=True)[1].tolist())[1:] == [expected] * (-(-MAX_QUERIES // expected) - 1)
    assert chosen.tolist() == choose_queries(labels, 0).tolist()
    assert chosen.tolist() != choose_queries(labels, 1).tolist()


@pytest.mark.parametrize(
    ("num_right", "num_wrong", "expected"), [(20, 20, (4, 4)), (20, 1, (7, 1)), (2, 20, (2, 6)), (0, 3, (0, 3)), (20, 0, (8, 0))]
)
def test_a_gallery_shows_successes_and_failures(num_right: int, num_wrong: int, expected: tuple[int, int]) -> None:
    mask = [True] * num_right + [False] * num_wrong
    labels = np.arange(len(mask)) // 2
    right, wrong = rows_to_draw(np.array(mask), labels, 0)
    assert (len(right), len(wrong)) == expected
    assert all(mask[number] for number in right)
    assert not any(mask[number] for number in wrong)
    for kind, num in ((right, num_right), (wrong, num_wrong)):
        assert len(set(labels[kind].tolist())) == min(len(kind), -(-num // 2))


def test_neighbours_are_the_nearest_others_even_among_duplicates(packed: Path) -> None:
    dataset = PackedDataset(packed, "test")
    embeddings = np.random.default_rng(0).standard_normal((len(dataset), 3)).astype(np.float32)
    embeddings[5:25] = embeddings[5]  # more duplicates than neighbours: the query is not among its nearest
    side = EmbeddedImages("test", dataset, embeddings, dataset.labels)
    seen = look_up(side, side, "cosine", 0).outcomes
    assert seen.neighbours.shape == seen.is_right.shape == (len(dataset), NUM_NEIGHBOURS)
    assert not (seen.neighbours == np.arange(len(dataset))[:, None]).any()
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -2)
    np.testing.assert_allclose(seen.similarities, -np.sort(-cosines, axis=1)[:, :NUM_NEIGHBOURS], atol=1e-5)
    assert np.array_equal(seen.is_right, dataset.labels[seen.neighbours] == dataset.labels[:, None])


def sides(folder: Path, **roles: list[int]) -> dict[str, EmbeddedImages]:
    """Pack black images; role -> number of images of each class. Embeddings of a class differ little from a direction of its own."""
    for role, sizes in ({"train": [2, 2]} | roles).items():
        for label, size in enumerate(sizes):
            (folder / f"raw/{role}/{role if role == 'train' else 'of'} {label}").mkdir(parents=True)
            for number in range(size):
                Image.new("RGB", (8, 8)).save(folder / f"raw/{role}/{role if role == 'train' else 'of'} {label}/{number}.png")
    prepare("folder", folder / "raw", folder / "packed", {})
    opened = {}
    for role in roles:
        dataset = PackedDataset(folder / "packed", role)
        rows = np.eye(8)[dataset.labels] + np.random.default_rng(0).normal(0, 0.1, (len(dataset), 8))
        opened[role] = EmbeddedImages(role, dataset, rows.astype(np.float32), dataset.labels)
    return opened


def drawn(queries: EmbeddedImages, gallery: EmbeddedImages, folder: Path) -> set[str]:
    folder.mkdir()
    draw_figures(queries, gallery, "cosine", 0, "run", [], folder)
    return {path.name for path in folder.iterdir()}


def test_pairs_are_of_queries_and_gallery_together(tmp_path: Path) -> None:
    """A catalogue has one gallery image of each product: no pair within the gallery is of one class."""
    of = sides(tmp_path, query=[2, 2, 2], gallery=[1, 1, 1])
    assert drawn(of["query"], of["gallery"], tmp_path / "figures") == {"similarities.png", "gallery.png", "map.png"}


def test_a_histogram_without_pairs_costs_no_other_figure(tmp_path: Path) -> None:
    """A test set of one class has no pairs of two classes."""
    side = sides(tmp_path, test=[4])["test"]
    assert drawn(side, side, tmp_path / "figures") == {"gallery.png", "map.png"}


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_the_map_has_the_run_s_metric(metric: Metric, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[object] = []
    monkeypatch.setattr(figures, "plot_map", lambda *arguments: mapped.append(arguments[-1]))
    dataset = PackedDataset(packed, "test")
    side = EmbeddedImages("test", dataset, np.eye(4, dtype=np.float32)[dataset.labels], dataset.labels)
    draw_figures(side, side, metric, 0, "run", [], tmp_path)
    assert mapped == [metric]


def test_queries_with_nothing_to_find_are_neither_right_nor_wrong(packed: Path) -> None:
    """Classes of a single image, as held-out classes of In-shop may be."""
    labels = np.array([0, 0, 0, 1, 2, 2, 2, 3])
    side = EmbeddedImages("test", PackedDataset(packed, "test"), np.eye(4, dtype=np.float32)[labels], labels)
    seen = look_up(side, side, "cosine", 0)
    assert seen.num_scored == 6
    assert seen.queries.tolist() == [0, 1, 2, 4, 5, 6]
    assert seen.outcomes.is_found.all()


@pytest.mark.parametrize("num_equal", [2, 25])
def test_a_query_whose_duplicate_has_another_class_is_missed_as_by_the_evaluator(num_equal: int, packed: Path) -> None:
    """Also if more images are equally near than are looked at. More queries than are sampled share the gallery."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 12, 50 * num_equal)
    embeddings = generator.standard_normal((50, 6)).astype(np.float32).repeat(num_equal, axis=0)
    side = EmbeddedImages("test", PackedDataset(packed, "test"), embeddings, labels)
    seen = look_up(side, side, "cosine", 0)
    by_class: dict[int, ClassRecall] = {}
    evaluate(embeddings, labels, EvaluationConfig(clustering=False), by_class=by_class)
    whole = query_outcomes(embeddings, labels, EvaluationConfig(), NUM_NEIGHBOURS)
    assert np.array_equal(seen.outcomes.is_found, whole.is_found[seen.queries])
    assert np.array_equal(seen.outcomes.neighbours, whole.neighbours[seen.queries])
    if seen.num_scored <= MAX_QUERIES:
        found = np.bincount(labels[seen.queries], seen.outcomes.is_found)
        assert found.sum() < seen.num_scored / 2
        assert {label: found[label] for label in by_class} == {label: one.recall * one.num_queries for label, one in by_class.items()}


def test_curves_take_parts_and_validation_that_not_every_step_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = [{"epoch": step // 2, "step": step, "learning_rate_factor": 1.0, "loss": 1.0} for step in range(4)]
    history[3] |= {"late": 2.0, "validation_recall_at_1": 0.5, "oracle_recall_at_1": 0.6}
    draw_curves(history, tmp_path / "all.png", "run")
    draw_curves(history[:3], tmp_path / "loss.png", "run")
    sizes = [int.from_bytes((tmp_path / name).read_bytes()[16:20], "big") for name in ("all.png", "loss.png")]
    assert sizes[0] > 1.5 * sizes[1]  # four panels, compared with one
    drawn: list[dict[str, object]] = []
    monkeypatch.setattr(figures, "plot_training_curves", lambda training, path, title, unseen: drawn.extend([training, unseen]))
    draw_curves(history, tmp_path / "all.png", "run")
    assert [list(curves) for curves in drawn] == [["loss", "late"], ["Recall@1 on held-out classes", "Recall@1 on the test classes"]]
