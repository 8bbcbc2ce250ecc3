"""Maps of embeddings: scores computed by hand, and the content of the drawing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.embedded import EmbeddedImages
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import EvaluationError
from dml_core.losses.registry import build_loss
from dml_core.measurements import embedding_map
from dml_core.measurements.contract import FinishedRun


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of four drawn digits, two of each for training and two for testing."""
    folder = tmp_path_factory.mktemp("idx")
    options = {"num_classes": 2, "images_per_class": 4, "image_size": 28, "num_modes": 1, "layout": "idx"}
    materialise("synthetic", options, folder / "raw")
    prepare("synthetic", folder / "raw", folder / "packed", options)
    return folder / "packed"


def at(degrees: list[float], norms: list[float]) -> np.ndarray:
    """Return points of the plane from their directions and norms."""
    turn = np.radians(degrees)
    return (np.array(norms) * np.stack([np.cos(turn), np.sin(turn)])).T.astype(np.float32)


def run_with(packed: Path, embeddings: np.ndarray, labels: list[int], directions: np.ndarray) -> FinishedRun:
    loss = build_loss("softmax", {"bias": False}, 2, embeddings.shape[1])
    loss.get_parameter("classifier.weight").data = torch.tensor(directions)
    scored = EmbeddedImages("test", PackedDataset(packed, "test"), embeddings, np.array(labels))
    training: Any = SimpleNamespace(loss=SimpleNamespace(name="softmax"), validation=None, num_epochs=1)
    load: Any = lambda: SimpleNamespace(loss=loss)  # noqa: E731
    return FinishedRun("a run", training, 0, packed, scored, scored, [], {}, load)


# Class 0 is at 0 and 20 degrees, its direction at 30; class 1 is at 90 and 100, its direction at 90.
EMBEDDINGS, CLASSES = at([0, 20, 90, 100], [1, 2, 3, 4]), [0, 0, 1, 1]
DIRECTIONS = at([30, 90], [5, 5])


@pytest.mark.parametrize("unit_length", [True, False])
def test_scores_by_hand(unit_length: bool, packed: Path, tmp_path: Path) -> None:
    run = run_with(packed, EMBEDDINGS, CLASSES, DIRECTIONS)
    scores = embedding_map.measure(run, embedding_map.Options(unit_length=unit_length), tmp_path)
    assert set(scores) == set(embedding_map.METRICS)
    assert scores["class_spread"] == pytest.approx((10 + 10 + 5 + 5) / 4, abs=1e-3)
    assert scores["own_angle"] == pytest.approx((30 + 10 + 0 + 10) / 4, abs=1e-3)
    assert scores["classified_right"] == 1.0
    assert scores["embedding_norm"] == pytest.approx(2.5)
    points = np.load(tmp_path / "embedding_map.npz")["points"]
    np.testing.assert_allclose(points, at([0, 20, 90, 100], [1, 1, 1, 1] if unit_length else [1, 2, 3, 4]), atol=1e-6)
    first, second = points[:2], points[2:]
    within = sum(float(np.square(part - part.mean(axis=0)).sum()) for part in (first, second)) / 4
    between = float(np.square(first.mean(axis=0) - second.mean(axis=0)).sum()) / 4
    assert scores["map_csc"] == pytest.approx(between / within, rel=1e-5)


def test_the_picture_has_every_class_s_colour_and_is_the_same_again(packed: Path, tmp_path: Path) -> None:
    run = run_with(packed, EMBEDDINGS, CLASSES, DIRECTIONS)
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        embedding_map.measure(run, embedding_map.Options(), folder)
    pictures = [(tmp_path / folder / "embedding_map.png").read_bytes() for folder in "ab"]
    assert pictures[0] == pictures[1]
    assert (tmp_path / "a/embedding_map.npz").read_bytes() == (tmp_path / "b/embedding_map.npz").read_bytes()
    colours = set(map(tuple, np.asarray(Image.open(tmp_path / "a/embedding_map.png").convert("RGB")).reshape(-1, 3).tolist()))
    assert {(0, 0x72, 0xB2), (0xD5, 0x5E, 0)} <= colours


def test_on_the_sphere_and_in_more_dimensions(packed: Path, tmp_path: Path) -> None:
    solid = np.array([[1, 0, 0], [0, 2, 0], [0, 0, 3], [0, -1, 3]], dtype=np.float32)
    scores = embedding_map.measure(
        run_with(packed, solid, [0, 0, 1, 1], np.eye(3, dtype=np.float32)[:2]), embedding_map.Options(), tmp_path
    )
    assert scores["own_angle"] == pytest.approx((0 + 90 + 90 + 108.4349) / 4)
    with Image.open(tmp_path / "embedding_map.png") as picture:
        assert picture.width > picture.height
    with pytest.raises(EvaluationError, match="a map is of embeddings of 2 or 3 dimensions, found 4"):
        embedding_map.measure(
            run_with(packed, np.ones((4, 4), np.float32), CLASSES, np.ones((2, 4), np.float32)), embedding_map.Options(), tmp_path
        )
