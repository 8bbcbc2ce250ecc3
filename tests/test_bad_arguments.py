"""Arguments that the public functions of docs/reference/api.md cannot use: each raises an error of this package, in one clear line.

Arguments of another type than the signature's, as None for an array, may raise Python's TypeError instead.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dml_core import ClassBalancedSampler, TrainedModel, evaluate, load_model
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.splits import open_role
from dml_core.errors import DmlError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate_shards, recall_by_class
from dml_core.evaluation.inputs import EmbeddingShard
from dml_core.evaluation.statistics.comparing import compare
from dml_core.evaluation.statistics.paired import paired_difference
from dml_core.index.index import Index
from dml_core.index.items import Item
from dml_core.index.writing import Batch, add_items, build_index, remove_items
from dml_core.losses import SoftTriple
from dml_core.losses.registry import build_loss
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import build_backbone
from dml_core.models.config import HeadConfig, ModelConfig
from dml_core.models.embedder import Embedder
from dml_core.trained import save_network
from dml_core.training.loop import build_system, fit
from tests.conftest import small_training

NAN = float("nan")
ROWS = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
LABELS = np.arange(12) % 3
SHARD = EmbeddingShard(lambda: ROWS, LABELS)
SCORES = {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: 2.0, 1: 2.0, 2: 5.0}}
BATCH = Batch(ROWS, [Item(f"item {number}") for number in range(12)])
SMALL = BackboneConfig(name="small_cnn", width=8)
TWO_LAYERS = ModelConfig(backbone=SMALL, head=HeadConfig(kind="two_layer"))
IMAGES = {"num_classes": 6, "images_per_class": 4, "image_size": 24, "num_modes": 1}
TRAINING = small_training("softtriple", num_epochs=1)
CPU = torch.device("cpu")


class Place:
    """A packed dataset, an index and a network."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.new = folder, folder / "new"
        materialise("synthetic", IMAGES, folder / "raw")
        prepare("synthetic", folder / "raw", folder / "packed", IMAGES)
        self.dataset = open_role(folder / "packed", "train", None)
        self.index = build_index(folder / "index", [BATCH], "m")
        system = build_system(TRAINING, 3, 0, CPU)
        save_network(folder / "network", TRAINING.model_dump(mode="json"), 3, system.state_dict())
        self.model: TrainedModel = load_model(folder / "network", "cpu")

    def scored(self, kind: str) -> Any:
        settings = {"validation": {"share": 0.2}, "keep_epochs": [kind]}
        return fit(small_training("softtriple", num_epochs=1, **settings), self.dataset, 0, self.new, CPU)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


CALLS: dict[str, Callable[[Place], Any]] = {
    "evaluate: a wrong metric": lambda place: evaluate(ROWS, LABELS, {"metric": "cosin"}),
    "evaluate: an unknown setting": lambda place: evaluate(ROWS, LABELS, {"metrics": "cosine"}),
    "evaluate: K that fall": lambda place: evaluate(ROWS, LABELS, {"recall_at": [2, 1]}),
    "evaluate: settings that are no mapping": lambda place: evaluate(ROWS, LABELS, "cosine"),  # type: ignore[arg-type]
    "evaluate: a negative seed": lambda place: evaluate(ROWS, LABELS, seed=-1),
    "evaluate: half a seed": lambda place: evaluate(ROWS, LABELS, seed=0.5),  # type: ignore[arg-type]
    "evaluate: NaN": lambda place: evaluate(ROWS * NAN, LABELS),
    "evaluate: integers": lambda place: evaluate(ROWS.astype(int), LABELS),
    "evaluate: one axis": lambda place: evaluate(ROWS[:, 0], LABELS),
    "evaluate: nothing": lambda place: evaluate(ROWS[:0], LABELS[:0]),
    "evaluate: few labels": lambda place: evaluate(ROWS, LABELS[:3]),
    "evaluate: labels with fractions": lambda place: evaluate(ROWS, LABELS + 0.5),
    "evaluate: queries without labels": lambda place: evaluate(ROWS, LABELS, query_embeddings=ROWS),
    "evaluate: queries of another size": lambda place: evaluate(ROWS, LABELS, None, ROWS[:, :2], LABELS),
    "evaluate_shards: none": lambda place: evaluate_shards([], EvaluationConfig()),
    "evaluate_shards: no query": lambda place: evaluate_shards([SHARD], EvaluationConfig(), []),
    "evaluate_shards: one, not a list": lambda place: evaluate_shards(SHARD, EvaluationConfig()),  # type: ignore[arg-type]
    "evaluate_shards: an array": lambda place: evaluate_shards([EmbeddingShard(ROWS, LABELS)], None),  # type: ignore[arg-type]
    "evaluate_shards: wrong settings": lambda place: evaluate_shards([SHARD], {"metric": "cosin"}),
    "recall_by_class: wrong settings": lambda place: recall_by_class(SHARD, {"metric": "cosin"}),
    "compare: NaN": lambda place: compare("d", "recall@1", {**SCORES, "c": {0: NAN, 1: 1.0, 2: 2.0}}),
    "compare: infinity": lambda place: compare("d", "recall@1", {**SCORES, "c": {0: float("inf"), 1: 1.0, 2: 2.0}}),
    "compare: text": lambda place: compare("d", "recall@1", {**SCORES, "c": {0: "1"}}),  # type: ignore[dict-item]
    "compare: points of nothing": lambda place: compare("d", "recall@1", SCORES, points=0.0),
    "compare: points of NaN": lambda place: compare("d", "recall@1", SCORES, points=NAN),
    "compare: no queries": lambda place: compare("d", "recall@1", SCORES, num_queries=0),
    "compare: negative decimals": lambda place: compare("d", "recall@1", SCORES, decimals=-1),
    "paired_difference: one seed": lambda place: paired_difference([1.0], [2.0]),
    "paired_difference: other seeds": lambda place: paired_difference([1.0, 2.0], [2.0]),
    "paired_difference: NaN": lambda place: paired_difference([1.0, NAN], [2.0, 3.0]),
    "paired_difference: two axes": lambda place: paired_difference([[1.0], [2.0]], [[1.0], [2.0]]),  # type: ignore[list-item]
    "paired_difference: no queries": lambda place: paired_difference([1.0, 2.0], [2.0, 3.0], 0),
    "SoftTriple: no dimension": lambda place: SoftTriple(num_classes=3, embedding_dim=0),
    "SoftTriple: a negative scale": lambda place: SoftTriple(num_classes=3, embedding_dim=4, scale=-1),
    "SoftTriple: an unknown option": lambda place: SoftTriple(num_classes=3, embedding_dim=4, scal=1),
    "SoftTriple: labels as text": lambda place: SoftTriple(num_classes=3, embedding_dim=4)(torch.ones(2, 4), ["a", "b"]),
    "SoftTriple: labels too large": lambda place: SoftTriple(num_classes=3, embedding_dim=4)(torch.ones(2, 4), torch.tensor([0, 3])),
    "SoftTriple: embeddings too short": lambda place: SoftTriple(num_classes=3, embedding_dim=4)(torch.ones(2, 3), torch.tensor([0, 1])),
    "SoftTriple: no sample": lambda place: SoftTriple(num_classes=3, embedding_dim=4)(torch.ones(0, 4), torch.ones(0).long()),
    "build_loss: an unknown name": lambda place: build_loss("softtripel", {}, 3, 4),
    "build_loss: an unknown option": lambda place: build_loss("softtriple", {"scal": 1}, 3, 4),
    "build_loss: a negative size": lambda place: build_loss("softtriple", {}, 3, -4),
    "build_loss: half a size": lambda place: build_loss("softtriple", {}, 3, 4.5),  # type: ignore[arg-type]
    "build_loss: classes as text": lambda place: build_loss("softtriple", {}, "3", 4),  # type: ignore[arg-type]
    "build_loss: an unknown loss of the library": lambda place: build_loss("pml:Proxy", {}, 3, 4),
    "build_backbone: an unknown name": lambda place: build_backbone(BackboneConfig(name="resnet17")),
    "build_backbone: an unknown timm model": lambda place: build_backbone(BackboneConfig(name="timm:resnet17")),
    "build_backbone: missing weights": lambda place: build_backbone(BackboneConfig(name="resnet18", weights="/nowhere")),
    "Embedder: a negative number of classes": lambda place: Embedder(TWO_LAYERS, -1),
    "prepare: an unknown reader": lambda place: prepare("cub", place.folder / "raw", place.new, {}),
    "prepare: an unknown option": lambda place: prepare("synthetic", place.folder / "raw", place.new, {"classes": 3}),
    "prepare: no raw folder": lambda place: prepare("synthetic", place.folder / "nowhere", place.new, IMAGES),
    "PackedDataset: an unknown role": lambda place: PackedDataset(place.folder / "packed", "training"),
    "PackedDataset: no dataset": lambda place: PackedDataset(place.folder, "train"),
    "open_role: no held-out classes": lambda place: open_role(place.folder / "packed", "validation", None),
    "ClassBalancedSampler: no label": lambda place: ClassBalancedSampler([], 2, 2),
    "ClassBalancedSampler: fractions": lambda place: ClassBalancedSampler([0.5, 1.0], 2, 2),
    "ClassBalancedSampler: more classes than there are": lambda place: ClassBalancedSampler([0, 1], 3, 2),
    "ClassBalancedSampler: no image": lambda place: ClassBalancedSampler([0, 1], 2, 0),
    "ClassBalancedSampler: a negative seed": lambda place: ClassBalancedSampler([0, 1], 2, 2, seed=-1),
    "fit: a negative seed": lambda place: fit(TRAINING, place.dataset, -1, place.new, CPU),
    "fit: a seed as text": lambda place: fit(TRAINING, place.dataset, "0", place.new, CPU),  # type: ignore[arg-type]
    "fit: a negative number of loaders": lambda place: fit(TRAINING, place.dataset, 0, place.new, CPU, num_loader_workers=-1),
    "fit: no scores of the best epoch": lambda place: place.scored("best_validation"),
    "fit: no scores of the oracle": lambda place: place.scored("oracle"),
    "fit: a file in place of the folder": lambda place: fit(TRAINING, place.dataset, 0, place.folder / "index/index.json", CPU),
    "build_system: no class": lambda place: build_system(TRAINING, 0, 0, CPU),
    "build_index: nothing": lambda place: build_index(place.new, [], "m"),
    "build_index: NaN": lambda place: build_index(place.new, [Batch(ROWS * NAN, BATCH.items)], "m"),
    "build_index: zeros": lambda place: build_index(place.new, [Batch(ROWS * 0, BATCH.items)], "m"),
    "build_index: few items": lambda place: build_index(place.new, [Batch(ROWS, BATCH.items[:2])], "m"),
    "build_index: names": lambda place: build_index(place.new, [Batch(ROWS, ["a"] * 12)], "m"),  # type: ignore[list-item]
    "build_index: classes as numbers": lambda place: build_index(place.new, [Batch(ROWS[:1], [Item("a", 3)])], "m"),  # type: ignore[arg-type]
    "build_index: a batch, not a list": lambda place: build_index(place.new, BATCH, "m"),  # type: ignore[arg-type]
    "build_index: an unknown metric": lambda place: build_index(place.new, [BATCH], "m", "cosin"),  # type: ignore[arg-type]
    "build_index: an unknown kind": lambda place: build_index(place.new, [BATCH], "m", approximate="ivv"),
    "build_index: an identity that is no text": lambda place: build_index(place.new, [BATCH], None),  # type: ignore[arg-type]
    "build_index: a hash that is no text": lambda place: build_index(place.new, [BATCH], "m", weights_sha256=3),  # type: ignore[arg-type]
    "add_items: another model": lambda place: add_items(place.folder / "index", [BATCH], "n"),
    "add_items: the same names": lambda place: add_items(place.folder / "index", [BATCH], "m"),
    "remove_items: an unknown name": lambda place: remove_items(place.folder / "index", "item"),
    "remove_items: numbers": lambda place: remove_items(place.folder / "index", [1, 2]),  # type: ignore[list-item]
    "Index.open: none": lambda place: Index.open(place.folder),
    "Index.search: NaN": lambda place: place.index.search(ROWS * NAN, 3),
    "Index.search: other dimensions": lambda place: place.index.search(ROWS[:, :2], 3),
    "Index.search: no neighbour": lambda place: place.index.search(ROWS, 0),
    "Index.search: half a neighbour": lambda place: place.index.search(ROWS, 1.5),  # type: ignore[arg-type]
    "load_model: nothing": lambda place: load_model(place.folder / "nowhere"),
    "load_model: an unknown device": lambda place: load_model(place.folder / "network", "gpu"),
    "TrainedModel.embed: a missing file": lambda place: place.model.embed("nowhere.jpg"),
    "TrainedModel.embed: no image": lambda place: place.model.embed(b"x"),
    "TrainedModel.embed: fractions": lambda place: place.model.embed(np.zeros((24, 24, 3))),  # type: ignore[arg-type]
    "TrainedModel.embed: half a batch": lambda place: place.model.embed(b"x", batch_size=0.5),  # type: ignore[arg-type]
    "TrainedModel.embed_views: fractions": lambda place: place.model.embed_views([torch.zeros(3, 24, 24)]),
    "TrainedModel.embed_views: one channel": lambda place: place.model.embed_views([torch.zeros(24, 24, dtype=torch.uint8)]),
    "TrainedModel.embed_views: an array": lambda place: place.model.embed_views([np.zeros((3, 24, 24), np.uint8)]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("called", CALLS)
def test_a_bad_argument_is_refused_in_one_line(place: Place, called: str) -> None:
    with pytest.raises(DmlError) as caught:
        CALLS[called](place)
    text = str(caught.value)
    assert text.strip()
    assert "\n" not in text
    assert not place.new.exists() or not any(place.new.glob("index.json"))


def test_plain_settings_are_taken_as_a_configuration() -> None:
    plain, config = {"metric": "euclidean", "recall_at": [1, 3]}, EvaluationConfig(metric="euclidean", recall_at=(1, 3))
    assert evaluate(ROWS, LABELS, plain) == evaluate(ROWS, LABELS, config)
    assert recall_by_class(SHARD, plain) == recall_by_class(SHARD, config)
    assert evaluate(ROWS, LABELS, {}) == evaluate(ROWS, LABELS)
