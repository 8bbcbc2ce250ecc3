"""A finished run with the embeddings, loss and facts that a test chooses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.data.store.packed import PackedDataset
from dml_core.measurements.contract import FinishedRun
from dml_core.training.loop import build_system
from tests.conftest import MODEL, small_training

MakeRun = Callable[..., FinishedRun]


@pytest.fixture
def finished(packed: Path) -> MakeRun:
    """Return a function that makes a run, with the loss `loss` with `options` for `num_classes` classes; `change` modifies the loss."""

    def make(
        loss: str = "softtriple",
        options: dict[str, Any] | None = None,
        num_classes: int = 4,
        seed: int = 0,
        embeddings: NDArray[Any] | None = None,
        facts: dict[str, Any] | None = None,
        model: dict[str, Any] = MODEL,
        change: Callable[[Any], None] = lambda loss: None,
        **training: Any,
    ) -> FinishedRun:
        config = small_training(loss, model, **training)
        config = config.model_copy(update={"loss": config.loss.model_copy(update={"options": options or {}})})
        test = PackedDataset(packed, "test")
        given = np.random.default_rng(0).standard_normal((len(test), 3)) if embeddings is None else embeddings
        side = EmbeddedImages("test", test, given.astype(np.float32), test.labels)

        def load() -> Any:
            system = build_system(config, num_classes, seed, torch.device("cpu")).eval()
            change(system.loss)
            return system

        return FinishedRun("run", config, seed, packed, side, side, [], facts or {}, load)

    return make
