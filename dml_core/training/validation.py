"""Recall@1 on classes unseen in training, after an epoch: a curve that shows overfitting, and the criterion for the best epoch.

The loop receives `HeldOutRecall` and does not import it, so the code that scores an epoch is not part of what a trained system depends on,
unless the run keeps its best epoch (`tasks.runs.identity`).

Shapes: N images, Q queries, G gallery images, D dimensions.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dml_core.data.store.info import read_info
from dml_core.data.store.packed import EncodedImages, PackedDataset
from dml_core.data.store.splits import open_role
from dml_core.data.views.batches import Loader, TestView
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import ConfigError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.inputs import EmbeddingShard
from dml_core.evaluation.retrieval.metrics import per_query_metrics
from dml_core.evaluation.retrieval.sweep import retrieve
from dml_core.models.embedder import Embedder
from dml_core.training.config import TrainingConfig
from dml_core.training.epochs import CURVE, RECALL
from dml_core.training.parallel.workers import Failures, rank, world_size

METRIC = RECALL["best_validation"]
MAX_IMAGES = 10_000  # limits the cost of validation per epoch; classes beyond it are omitted whole
BATCH_SIZE = 256


class Scorers(NamedTuple):
    """Scorers called after an epoch, None if unused: on the held-out classes, on the test classes, for the curve."""

    held_out: "HeldOutRecall | None"
    tested: "HeldOutRecall | None"
    curve: "_Curve | None"


def scorers(
    folder: Path, config: TrainingConfig, device: torch.device, num_loader_workers: int = 0, encoded: EncodedImages | None = None
) -> Scorers:
    """Return the scorers of a run's epochs.

    The oracle uses the protocol of the papers: every test image, and queries and gallery if the test set has them.

    Args:
        folder: folder of the packed dataset.
        config: the run's configuration.
        device: this worker's device.
        num_loader_workers: processes that load images; 0 loads in this process.
        encoded: source of the images; None for `images.arrow` in `folder`.

    Raises:
        ConfigError: the best epoch cannot be determined, because no image has another of its class to retrieve.
    """
    held_out = tested = curve = None
    if config.validation is not None:
        dataset = open_role(folder, "validation", config.validation, encoded)
        held_out = HeldOutRecall(dataset, config.transform, device, num_loader_workers)
    common = (config.transform, device, num_loader_workers)
    has_queries = "query" in read_info(folder).roles
    test_role = "query" if has_queries else "test"

    def on_test(max_images: float, metric: str) -> HeldOutRecall:
        gallery = open_role(folder, "gallery", None, encoded) if has_queries else None
        return HeldOutRecall(open_role(folder, test_role, None, encoded), *common, gallery, max_images, metric)

    if "oracle" in config.keep_epochs:
        tested = on_test(math.inf, RECALL["oracle"])
    if config.recall_every_epochs is not None:
        curve = _Curve(
            HeldOutRecall(open_role(folder, "train", config.validation, encoded), *common, metric=CURVE["train"]),
            on_test(MAX_IMAGES, CURVE["test"]),
        )
    for kind, scorer in (("best_validation", held_out), ("oracle", tested)):
        if kind in config.keep_epochs and scorer is not None and not scorer.can_score:
            raise ConfigError(f"keep_epochs: the '{kind}' epoch cannot be told, as no class that it is scored on has two images")
    return Scorers(held_out, tested, curve)


@dataclass(frozen=True)
class HeldOutRecall:
    """Scores a model in its current state; every worker of the process group makes the same call and gets the same result.

    Attributes:
        dataset: images of classes not trained on.
        transform: as in training; the plain view is used.
        device: this worker's device.
        num_loader_workers: processes that load images; 0 loads in this process.
        gallery: images to retrieve from; None compares the images with each other.
        max_images: limit on the dataset's images; infinity uses all, as the evaluator does.
        metric: name of the score.
    """

    dataset: PackedDataset
    transform: TransformConfig
    device: torch.device
    num_loader_workers: int = 0
    gallery: PackedDataset | None = None
    max_images: float = MAX_IMAGES
    metric: str = METRIC

    @property
    def can_score(self) -> bool:
        """True if some image has another of its class to retrieve."""
        labels_Q = self.dataset.labels[bounded_rows(self.dataset.labels, self.max_images)]
        if self.gallery is not None:
            return bool(np.isin(labels_Q, self.gallery.labels).any())
        return bool((np.bincount(labels_Q) > 1).any())

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return exact Recall@1 by cosines; empty if no image has another of its class to retrieve, or embeddings are not finite.

        Weights, BatchNorm's averages and random streams are not changed.
        """
        assert isinstance(model, Embedder)
        rows_Q = bounded_rows(self.dataset.labels, self.max_images)
        labels_Q = self.dataset.labels[rows_Q]
        queries_QD = self._embed(model, self._loader, rows_Q)
        gallery_GD, labels_G = queries_QD, labels_Q
        if self.gallery is not None:
            gallery_GD, labels_G = self._embed(model, self._gallery_loader, np.arange(len(self.gallery))), self.gallery.labels
        if not self.can_score or not (np.isfinite(queries_QD).all() and np.isfinite(gallery_GD).all()):
            return {}
        # The evaluator's own sweep, without the module that imports FAISS, which must not share a process with torch's CUDA.
        queries = None if self.gallery is None else [EmbeddingShard(lambda: queries_QD, labels_Q)]
        scores, _, _ = retrieve([EmbeddingShard(lambda: gallery_GD, labels_G)], EvaluationConfig(), queries)
        return {self.metric: float(per_query_metrics(scores, (1,))["recall@1"].mean())}

    @cached_property
    def _loader(self) -> Loader:
        """Loader whose processes persist over epochs and end with this scorer."""
        return Loader(self.dataset, self.num_loader_workers, self.device)

    @cached_property
    def _gallery_loader(self) -> Loader:
        assert self.gallery is not None
        return Loader(self.gallery, self.num_loader_workers, self.device)

    def _embed(self, model: Embedder, loader: Loader, rows_N: np.ndarray) -> np.ndarray:
        """Return embeddings (N, D). Workers take batches in turn, so that each batch is computed as by a single worker."""
        batches = np.split(np.arange(len(rows_N)), range(BATCH_SIZE, len(rows_N), BATCH_SIZE))
        mine = batches[rank() :: world_size()]
        was_training = model.training
        embeddings_ND: Tensor = torch.zeros(len(rows_N), int(model.head.embedding_dim), dtype=torch.float32, device=self.device)
        failures = Failures()
        with torch.no_grad(), failures.kept():
            model.eval()
            loaded = loader.batches([rows_N[batch] for batch in mine], TestView(self.transform))
            for (images, _), batch in zip(loaded, mine, strict=True):
                embeddings_ND[torch.from_numpy(batch).to(self.device)] = model.embed(images).float()
        model.train(was_training)
        failures.raise_together()
        if world_size() > 1:
            dist.all_reduce(embeddings_ND)  # each row is non-zero on only one worker
        return embeddings_ND.cpu().numpy()


@dataclass(frozen=True)
class _Curve:
    """Recall@1 of the training and test images, limited to whole classes as in validation."""

    training: HeldOutRecall
    test: HeldOutRecall

    def __call__(self, model: nn.Module) -> dict[str, float]:
        return self.training(model) | self.test(model)


def bounded_rows(labels_N: np.ndarray, max_images: float = MAX_IMAGES) -> np.ndarray:
    """Return rising indices of the images of the first whole classes that stay within the bound; at least the first two classes."""
    classes, sizes = np.unique(labels_N, return_counts=True)
    num_kept = max(2, int((np.cumsum(sizes) <= max_images).sum()))
    return np.flatnonzero(np.isin(labels_N, classes[:num_kept]))
