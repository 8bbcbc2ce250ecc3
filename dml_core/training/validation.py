"""Recall@1 on the held-out training classes after each epoch: the curve that tells learning from learning by heart.

The loop is handed `HeldOutRecall` and does not import it, so that what scores an epoch is no part of what a trained system depends on.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dml_core.data.store.packed import PackedDataset
from dml_core.data.views.batches import TestView, iterate_batches
from dml_core.data.views.transform_config import TransformConfig
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.geometry import as_points
from dml_core.evaluation.retrieval import per_query_metrics
from dml_core.evaluation.sweep import Resources, Shard, score_queries
from dml_core.evaluation.tiles import usable_device
from dml_core.models.embedder import Embedder
from dml_core.training.parallel import rank, world_size

METRIC = "validation_recall_at_1"
MAX_IMAGES = 10_000  # what an epoch's validation may cost; of more, whole classes are left out
BATCH_SIZE = 256


@dataclass(frozen=True)
class HeldOutRecall:
    """Scores a model as it is now; every worker of the process group calls it alike and gets the same answer.

    Attributes:
        dataset: the held-out classes' images.
        transform: as in training; the plain view is taken.
        device: this worker's.
        num_loader_workers: processes that load images; 0 loads in this one.
    """

    dataset: PackedDataset
    transform: TransformConfig
    device: torch.device
    num_loader_workers: int = 0

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Recall@1 by cosines among the held-out images, exact; nothing where no class has two images or embeddings are not finite.

        Neither weights nor BatchNorm's averages nor random streams are touched.
        """
        assert isinstance(model, Embedder)
        rows_N = bounded_rows(self.dataset.labels)
        labels_N = self.dataset.labels[rows_N]
        embeddings_ND = self._embed(model, rows_N)
        if not (np.bincount(labels_N) > 1).any() or not np.isfinite(embeddings_ND).all():
            return {}
        # The evaluator's own sweep, called past the module that imports FAISS: that must not share a process with torch's CUDA.
        points = as_points(embeddings_ND, "cosine")
        resources = Resources(EvaluationConfig().max_block_bytes, usable_device("cpu"))
        scores = score_queries([Shard(lambda: points, labels_N, 0)], points, labels_N, np.arange(len(labels_N)), resources)
        return {METRIC: float(per_query_metrics(scores, (1,))["recall@1"].mean())}

    def _embed(self, model: Embedder, rows_N: np.ndarray) -> np.ndarray:
        """(N, D): batches go round the workers, so that each is computed as it would be by one worker."""
        batches = np.split(np.arange(len(rows_N)), range(BATCH_SIZE, len(rows_N), BATCH_SIZE))
        mine = batches[rank() :: world_size()]
        was_training = model.training
        devices = [self.device] if self.device.type == "cuda" else []
        embeddings_ND: Tensor = torch.zeros(len(rows_N), int(model.head.embedding_dim), dtype=torch.float32, device=self.device)
        with torch.no_grad(), torch.random.fork_rng(devices):  # a DataLoader draws from torch's stream
            model.eval()
            loaded = iterate_batches(self.dataset, [rows_N[batch] for batch in mine], TestView(self.transform), self.num_loader_workers)
            for (images, _), batch in zip(loaded, mine, strict=True):
                embeddings_ND[torch.from_numpy(batch).to(self.device)] = model.embed(images.to(self.device)).float()
            model.train(was_training)
        if world_size() > 1:
            dist.all_reduce(embeddings_ND)  # every row is one worker's, the others have zeros
        return embeddings_ND.cpu().numpy()


def bounded_rows(labels_N: np.ndarray, max_images: int = MAX_IMAGES) -> np.ndarray:
    """Rising indices of the images of as many whole classes, first to last, as stay within the bound; at least the first two classes."""
    classes, sizes = np.unique(labels_N, return_counts=True)
    num_kept = max(2, int((np.cumsum(sizes) <= max_images).sum()))
    return np.flatnonzero(np.isin(labels_N, classes[:num_kept]))
