"""Small runs in this process, without Ray: pack a dataset, train, embed, score. What `flows.side` is made of."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.splits import open_role
from dml_core.data.views.batches import TestView, iterate_batches
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate
from dml_core.training.config import TrainingConfig
from dml_core.training.history import read_history
from dml_core.training.loop import fit
from dml_core.training.parallel import TrainingSystem
from tasks.runs.specs import DatasetSpec

CPU = torch.device("cpu")
BATCH_SIZE = 256
SCORES = EvaluationConfig()


@dataclass(frozen=True)
class LocalRun:
    """A trained system and where it came from.

    Attributes:
        history: its steps, as `read_history` gives them.
    """

    config: TrainingConfig
    packed: Path
    system: TrainingSystem
    history: list[dict[str, float]]

    @torch.no_grad()
    def embed(self, role: str) -> tuple[np.ndarray, np.ndarray]:
        """Test embeddings (N, E) float32 and labels (N,) of a role, in dataset order."""
        dataset = open_role(self.packed, role, self.config.validation)
        batches = np.split(np.arange(len(dataset)), range(BATCH_SIZE, len(dataset), BATCH_SIZE))
        embed = self.system.eval().model.embed
        assert callable(embed)
        rows = [embed(images).numpy() for images, _ in iterate_batches(dataset, batches, TestView(self.config.transform), 0)]
        return np.concatenate(rows), dataset.labels

    def scores(self, role: str = "test") -> dict[str, float]:
        """The evaluator's metrics of a role."""
        return evaluate(*self.embed(role), SCORES)


def train_here(config: TrainingConfig, packed: Path, seed: int) -> LocalRun:
    """Train on the packed dataset's training role; nothing is kept on disk."""
    with tempfile.TemporaryDirectory() as folder:
        system = fit(config, open_role(packed, "train", config.validation), seed, Path(folder), CPU)
        return LocalRun(config, packed, system, read_history(Path(folder)))


def pack_here(dataset: DatasetSpec, root: Path, folder: Path) -> Path:
    """Pack a dataset into `folder`; its raw files are below `root`, and brought there where they are missing.

    Raises:
        DataError: they are missing and cannot be brought, or are damaged.
    """
    materialise(dataset.reader, dataset.options, root / dataset.raw)
    prepare(dataset.reader, root / dataset.raw, folder, dataset.options)
    return folder
