"""Recall@1 on classes unseen in training, after an epoch: a curve that shows overfitting, and the criterion for the best epoch.

The loop receives `HeldOutRecall` and does not import it, so the code that scores an epoch is not part of what a trained system depends on,
unless the run keeps its best epoch (`tasks.runs.identity`).

Shapes: N images, Q queries, G gallery images, D dimensions.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from dml_core.data.store.info import read_info
from dml_core.data.store.packed import EncodedImages, Indices, PackedDataset
from dml_core.data.store.rows import Box
from dml_core.data.store.splits import open_role
from dml_core.data.views.batches import Batch, Loader, TestView
from dml_core.data.views.transform_config import TransformConfig
from dml_core.epochs import CURVE, RECALL
from dml_core.errors import ConfigError, EvaluationError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.inputs import checked_embeddings
from dml_core.evaluation.retrieval.geometry import Points, as_points
from dml_core.evaluation.retrieval.sweep import Shard, score_queries
from dml_core.float32 import full_float32
from dml_core.models.embedder import Embedder
from dml_core.training.config import TrainingConfig
from dml_core.training.parallel.workers import failing_together, rank, sum_over_workers, world_size

METRIC = RECALL["best_validation"]
MAX_IMAGES = 10_000  # limits the cost of validation per epoch; classes beyond it are omitted whole
BATCH_SIZE = 256


def scorers(
    folder: Path, config: TrainingConfig, images: "ScoredImages", source: EncodedImages | None = None
) -> "tuple[HeldOutRecall | None, HeldOutRecall | None, Callable[[nn.Module], dict[str, float]] | None]":
    """Return the scorers of a run's epochs, None if unused: on the held-out classes, on the test classes, for the curve.

    The oracle uses the protocol of the papers: every test image, and queries and gallery if the test set has them. The curve is of the
    training and the test images, limited to whole classes as in validation.

    Args:
        folder: folder of the packed dataset.
        config: the run's configuration.
        images: loads the images.
        source: source of the images; None for `images.arrow` in `folder`.

    Raises:
        ConfigError: the best epoch cannot be determined, because no image has another of its class to retrieve.
    """
    held_out = tested = None
    has_queries = "query" in read_info(folder).roles
    test_role = "query" if has_queries else "test"

    def on_test(max_images: float, metric: str) -> HeldOutRecall:
        gallery = open_role(folder, "gallery", None, source) if has_queries else None
        return HeldOutRecall(images, open_role(folder, test_role, None, source), config.transform, gallery, max_images, metric)

    if config.validation is not None:
        held_out = HeldOutRecall(images, open_role(folder, "validation", config.validation, source), config.transform)
    if "oracle" in config.keep_epochs:
        tested = on_test(math.inf, RECALL["oracle"])
    for kind, scorer in (("best_validation", held_out), ("oracle", tested)):
        if kind in config.keep_epochs and scorer is not None and not scorer.can_score:
            raise ConfigError(f"keep_epochs: the '{kind}' epoch cannot be chosen, as no class that it is scored on has two images")
    if config.recall_every_epochs is None:
        return held_out, tested, None
    of_training = HeldOutRecall(images, open_role(folder, "train", config.validation, source), config.transform, metric=CURVE["train"])
    of_test = on_test(MAX_IMAGES, CURVE["test"])
    return held_out, tested, lambda model: of_training(model) | of_test(model)


class ScoredImages:
    """The images that a run's scorers load, behind one loader: a worker has the processes of one, not of each scorer.

    Args:
        device: this worker's device.
        num_loader_workers: processes that load images; 0 loads in this process.
    """

    def __init__(self, device: torch.device, num_loader_workers: int = 0) -> None:
        self.device = device
        self._datasets = _Joined()
        self._num_loader_workers = num_loader_workers

    def add(self, dataset: PackedDataset) -> None:
        """Add a dataset, before the first batch is loaded."""
        self._datasets.starts.append(self._datasets.starts[-1] + len(dataset))
        self._datasets.parts.append(dataset)

    def batches(self, dataset: PackedDataset, batches: Sequence[Indices], view: TestView) -> Iterator[Batch]:
        """Yield batches of one of the datasets, as `Loader.batches` does."""
        start = self._datasets.starts[self._datasets.parts.index(dataset)]
        return self._loader.batches([start + batch for batch in batches], view)

    def close(self) -> None:
        """End the processes that load images."""
        if "_loader" in vars(self):
            self._loader.close()

    @cached_property
    def _loader(self) -> Loader:
        """Loader whose processes persist over epochs."""
        return Loader(cast(PackedDataset, self._datasets), self._num_loader_workers, self.device)


class _Joined:
    """Several datasets, one after another, with the methods of one that a loader calls."""

    def __init__(self) -> None:
        self.parts: list[PackedDataset] = []
        self.starts = [0]

    def image(self, index: int) -> Tensor:
        dataset, own_index = self._find(index)
        return dataset.image(own_index)

    def encoded(self, index: int) -> tuple[Tensor, int]:
        dataset, own_index = self._find(index)
        return dataset.encoded(own_index)

    def box(self, index: int) -> Box | None:
        dataset, own_index = self._find(index)
        return dataset.box(own_index)

    def expect(self, indices: Indices) -> None:
        """Pass on the indices, all of one dataset; none of them ends what any dataset expects."""
        if len(indices) == 0:
            for dataset in self.parts:
                dataset.expect(indices)
            return
        number = bisect_right(self.starts, int(indices[0])) - 1
        self.parts[number].expect(indices - self.starts[number])

    def _find(self, index: int) -> tuple[PackedDataset, int]:
        number = bisect_right(self.starts, index) - 1
        return self.parts[number], index - self.starts[number]


@dataclass(frozen=True)
class HeldOutRecall:
    """Scores a model in its current state; every worker of the process group makes the same call and gets the same result.

    Attributes:
        images: loads the images of the dataset and of the gallery.
        dataset: images of classes not trained on.
        transform: as in training; the plain view is used.
        gallery: images to retrieve from; None compares the images with each other.
        max_images: limit on the dataset's images; infinity uses all, as the evaluator does.
        metric: name of the score.
    """

    images: ScoredImages
    dataset: PackedDataset
    transform: TransformConfig
    gallery: PackedDataset | None = None
    max_images: float = MAX_IMAGES
    metric: str = METRIC

    def __post_init__(self) -> None:
        self.images.add(self.dataset)
        if self.gallery is not None:
            self.images.add(self.gallery)

    @property
    def can_score(self) -> bool:
        """True if some image has another of its class to retrieve."""
        labels_Q = self.dataset.labels[bounded_rows(self.dataset.labels, self.max_images)]
        if self.gallery is not None:
            return bool(np.isin(labels_Q, self.gallery.labels).any())
        return bool((np.bincount(labels_Q) > 1).any())

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return exact Recall@1 by cosines; empty if no image has another of its class to retrieve, or embeddings cannot be scored.

        Embeddings are not scored if one is zero, not finite or too large: a network that passes through such a state may recover.

        Weights, BatchNorm's averages and random streams are not changed.
        """
        assert isinstance(model, Embedder)
        rows_Q = bounded_rows(self.dataset.labels, self.max_images)
        labels_Q = self.dataset.labels[rows_Q]
        queries_QD = self._embed(model, self.dataset, rows_Q)
        gallery_GD, labels_G = queries_QD, labels_Q
        if self.gallery is not None:
            gallery_GD, labels_G = self._embed(model, self.gallery, np.arange(len(self.gallery))), self.gallery.labels
        if not self.can_score:
            return {}
        try:
            queries, gallery = (as_points(checked_embeddings(rows), EvaluationConfig().metric) for rows in (queries_QD, gallery_GD))
        except EvaluationError:  # of every worker: all have the same embeddings
            return {}
        return {self.metric: self._recall(queries, labels_Q, gallery, labels_G)}

    def _embed(self, model: Embedder, dataset: PackedDataset, rows_N: np.ndarray) -> np.ndarray:
        """Return embeddings (N, D). Workers take batches in turn, so that each batch is computed as by a single worker."""
        batches = np.split(np.arange(len(rows_N)), range(BATCH_SIZE, len(rows_N), BATCH_SIZE))
        mine = batches[rank() :: world_size()]
        was_training, device = model.training, self.images.device
        embeddings_ND: Tensor = torch.zeros(len(rows_N), int(model.head.embedding_dim), dtype=torch.float32, device=device)
        with failing_together(), torch.no_grad(), full_float32():  # as embeddings are extracted for the final scores
            model.eval()
            loaded = self.images.batches(dataset, [rows_N[batch] for batch in mine], TestView(self.transform))
            for (images, _), batch in zip(loaded, mine, strict=True):
                embeddings_ND[torch.from_numpy(batch).to(device)] = model.embed(images).float()
        model.train(was_training)
        return sum_over_workers(embeddings_ND).cpu().numpy()  # each row is non-zero on only one worker

    def _recall(self, queries: Points, labels_Q: np.ndarray, gallery: Points, labels_G: np.ndarray) -> float:
        """Return the share of the queries with a positive whose nearest image is one; each worker scores a part of the queries."""
        hits_and_scored = torch.zeros(2, dtype=torch.int64)
        with failing_together():
            # The evaluator's own sweep, without the module that imports FAISS, which must not share a process with torch's CUDA.
            mine_Q = np.array_split(np.arange(len(labels_Q)), world_size())[rank()]
            own = replace(queries, raw=queries.raw[mine_Q], divisors=queries.divisors[mine_Q])
            shard, self_index_Q = Shard(lambda: gallery, labels_G), mine_Q if self.gallery is None else None
            if len(mine_Q):
                max_bytes, device = EvaluationConfig().max_block_bytes, self.images.device
                scores = score_queries([shard], own, labels_Q[mine_Q], self_index_Q, max_bytes, device)
                hits_and_scored += torch.tensor([np.sum(scores.first_rank[scores.is_scored] == 1), scores.is_scored.sum()])
        hits, num_scored = sum_over_workers(hits_and_scored.to(self.images.device)).cpu().tolist()
        return float(hits / num_scored)


def bounded_rows(labels_N: np.ndarray, max_images: float = MAX_IMAGES) -> np.ndarray:
    """Return rising indices of the images of the first whole classes that stay within the bound; at least the first two classes."""
    classes, sizes = np.unique(labels_N, return_counts=True)
    num_kept = max(2, int((np.cumsum(sizes) <= max_images).sum()))
    return np.flatnonzero(np.isin(labels_N, classes[:num_kept]))
