"""Interface of the measurements of finished runs.

A measurement is a module's function `measure(run, options, folder) -> scores`; options are of its class `Options`, if it has one. Scores
are named by the metrics that a table's columns use; pictures, and arrays for readers' own plots, go into `folder`. The same run gives the
same bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.training.config import TrainingConfig

if TYPE_CHECKING:
    from dml_core.data.store.packed import PackedDataset
    from dml_core.training.parallel.workers import TrainingSystem

BATCH_SIZE = 256


@dataclass(frozen=True)
class FinishedRun:
    """One finished run.

    Attributes:
        title: title of pictures.
        training: training configuration.
        seed: the run's seed.
        dataset: folder of the packed dataset.
        queries, gallery: the scored roles; the same object if a role is searched in itself.
        history: one row per step.
        facts: facts of the training: seconds, device.
        load: loads the trained model and loss on the CPU, in evaluation mode, with the loss as in the epoch of the weights; `system` caches
            them.
    """

    title: str
    training: TrainingConfig
    seed: int
    dataset: Path
    queries: EmbeddedImages
    gallery: EmbeddedImages
    history: list[dict[str, float]]
    facts: dict[str, Any]
    load: "Callable[[], TrainingSystem]"

    @cached_property
    def system(self) -> "TrainingSystem":
        """The trained model and loss, loaded on first use."""
        return self.load()

    @cached_property
    def training_set(self) -> "PackedDataset":
        """The training images, without held-out classes."""
        from dml_core.data.store.splits import open_role

        return open_role(self.dataset, "train", self.training.validation)

    @cached_property
    def training_images(self) -> EmbeddedImages:
        """The training images without augmentation, in dataset order; embedded on the CPU on first use."""
        import torch

        from dml_core.data.views.batches import Loader, TestView
        from dml_core.models.embedder import Embedder

        model = self.system.model
        assert isinstance(model, Embedder)
        dataset = self.training_set
        batches = np.split(np.arange(len(dataset)), range(BATCH_SIZE, len(dataset), BATCH_SIZE))
        with torch.no_grad():
            views = Loader(dataset).batches(batches, TestView(self.training.transform))
            parts = [model.embed(images).float().numpy() for images, _ in views]
        return EmbeddedImages("train", dataset, np.concatenate(parts), dataset.labels)
