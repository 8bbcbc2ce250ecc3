"""Retrieved images: queries depend only on the labels, the neighbours equal a search by hand, and the score counts them."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import EvaluationError
from dml_core.evaluation.evaluator import evaluate
from dml_core.measurements.contract import FinishedRun
from dml_core.measurements.retrieved_images import Options, fixed_queries, measure
from tests.measurements.conftest import MakeRun

LABELS = np.array([0, 0, 0, 1, 2, 2, 2, 2, 3, 3])


@pytest.mark.parametrize(("num_queries", "expected"), [(1, [6]), (2, [1, 9]), (3, [1, 6, 9]), (8, [1, 6, 9])])
def test_the_middle_image_of_evenly_spaced_classes_asks(num_queries: int, expected: list[int]) -> None:
    """Class 1 has a single image, so that no other image of its class can be found."""
    assert fixed_queries(LABELS, LABELS, True, num_queries).tolist() == expected


def test_of_queries_with_a_gallery_of_their_own_those_ask_that_can_find() -> None:
    assert fixed_queries(np.array([4, 1, 1, 2]), np.array([2, 1, 5]), False, 8).tolist() == [2, 3]


def test_every_system_is_asked_the_same_and_its_own_neighbours_are_shown(finished: MakeRun, packed: Path, tmp_path: Path) -> None:
    labels = PackedDataset(packed, "test").labels
    records, scores = [], []
    for seed in (1, 2):
        embeddings = np.random.default_rng(seed).standard_normal((len(labels), 5)) + 1.2 * np.eye(5)[labels]
        scores.append(measure(finished(embeddings=embeddings), Options(num_queries=3, num_neighbours=2), tmp_path))
        records.append(json.loads((tmp_path / "retrieved.json").read_text())["queries"])
        unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
        cosines = unit @ unit.T - 9 * np.eye(len(labels))
        for row in records[-1]:
            assert row["found"] == np.argsort(-cosines[row["query"]])[:2].tolist()
            assert row["right"] == (labels[row["found"]] == labels[row["query"]]).tolist()
        shown = [right for row in records[-1] for right in row["right"]]
        nearest = labels[np.argsort(-cosines, axis=1)[:, :2]] == labels[:, None]
        assert scores[-1] == pytest.approx({"right_among_shown": np.mean(shown), "right_among_nearest": nearest.mean()})
    assert [row["query"] for row in records[0]] == [row["query"] for row in records[1]]
    assert [row["found"] for row in records[0]] != [row["found"] for row in records[1]]
    with Image.open(tmp_path / "retrieved.png") as picture:
        assert picture.height > 3 * 144


def test_perfect_and_hopeless_embeddings(finished: MakeRun, packed: Path, tmp_path: Path) -> None:
    labels = PackedDataset(packed, "test").labels
    perfect = np.eye(labels.max() + 1)[labels]
    assert set(measure(finished(embeddings=perfect), Options(), tmp_path).values()) == {1.0}
    places = np.array([np.flatnonzero(np.flatnonzero(labels == label) == index)[0] for index, label in enumerate(labels)])
    hopeless = np.eye(places.max() + 1)[places]  # an image equals those of other classes at the same position in their class
    assert set(measure(finished(embeddings=hopeless), Options(num_neighbours=3), tmp_path).values()) == {0.0}


def test_at_the_same_distance_a_wrong_image_comes_first_whatever_the_order(finished: MakeRun, packed: Path, tmp_path: Path) -> None:
    """As in Recall@1: an image's duplicates of other classes are not hidden by those of its class with a lower index."""
    labels = PackedDataset(packed, "test").labels
    of_equals = np.eye(4)[np.arange(len(labels)) % 4]
    scores = measure(finished(embeddings=of_equals), Options(num_queries=3, num_neighbours=1), tmp_path)
    assert scores["right_among_nearest"] == evaluate(of_equals, labels)["recall@1"] == 0


def test_a_role_in_which_nothing_can_be_found_is_refused(finished: MakeRun, tmp_path: Path) -> None:
    run = finished()
    alone = EmbeddedImages("test", run.queries.dataset, run.queries.embeddings, np.arange(len(run.queries.labels)))
    lonely = FinishedRun(run.title, run.training, 0, run.dataset, alone, alone, [], {}, run.load)
    with pytest.raises(EvaluationError, match=r"^run: no query has another image of its class to find$"):
        measure(lonely, Options(), tmp_path)
