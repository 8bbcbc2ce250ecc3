"""Shared by several test modules: a small packed dataset, made by the real generator and `prepare`, and small training settings."""

from pathlib import Path
from typing import Any

import pytest

from dml_core.config import merge, parse
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.training.config import TrainingConfig

SYNTHETIC_OPTIONS = {"num_classes": 8, "images_per_class": 9, "image_size": 24, "num_modes": 2}
MODEL: dict[str, Any] = {"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": "linear", "embedding_dim": 8}}
SETTINGS: dict[str, Any] = {
    "sampler": {"kind": "shuffled", "batch_size": 8},
    "transform": {"crop": "padded", "crop_size": 24, "padding": 2, "flip": True, "scaling": "zero-one"},
    "optimiser": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9, "groups": {"loss": {"learning_rate": 0.5}}},
    "schedule": {"kind": "cosine", "warmup_epochs": 1.0},
    "num_epochs": 3,
}


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed synthetic dataset: 36 training images of 4 classes (the last batch of 8 is short), 36 test images of 4 others."""
    folder = tmp_path_factory.mktemp("dataset")
    materialise("synthetic", SYNTHETIC_OPTIONS, folder / "raw")
    prepare("synthetic", folder / "raw", folder / "packed", SYNTHETIC_OPTIONS)
    return folder / "packed"


def small_training(loss: str = "normalised_softmax", model: dict[str, Any] = MODEL, **changes: Any) -> TrainingConfig:
    """The small settings with `changes` laid over them, for a loss and a model."""
    return parse(TrainingConfig, merge(SETTINGS, changes) | {"loss": {"name": loss}, "model": model}, "test settings")
