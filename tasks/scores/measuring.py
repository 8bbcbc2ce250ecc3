"""Measure a finished run beyond the evaluator's scores (`dml_core.measurements`), from its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dml_core.data.store.splits import open_role
from dml_core.epochs import Epoch
from dml_core.errors import StoreError
from dml_core.measurements.contract import FinishedRun
from dml_core.measurements.registry import measurement, parse_measurement
from dml_core.training.checkpoints.file import load_checkpoint, weights_of
from dml_core.training.config import TrainingConfig
from dml_core.training.history import read_history
from dml_core.training.loop import build_system
from dml_core.training.parallel.workers import TrainingSystem
from tasks.scores.sides import open_sides

MEASUREMENTS_FOLDER = "measurements"


def measure_run(
    measurements: Mapping[str, Mapping[str, Any]],
    training: TrainingConfig,
    seed: int,
    title: str,
    dataset: Path,
    trained: Path,
    embeddings: Path,
    facts: dict[str, Any],
    folder: Path,
    epoch: Epoch = "last",
) -> dict[str, float]:
    """Run every measurement, each in its own folder in `folder/measurements`, and return the scores.

    Args:
        measurements: name -> options.
        dataset, trained, embeddings: folders of the packed dataset, of the run's checkpoint and of its embeddings.
        facts: those of the training.
        folder: where the run's scores are stored.
        epoch: epoch whose weights made the embeddings and are loaded.

    Raises:
        ConfigError: a measurement or option does not exist.
        EvaluationError: a measurement does not fit the run.
        StoreError: the checkpoint is missing.
    """
    queries, gallery = open_sides(embeddings, dataset, training.validation)
    history = read_history(trained)
    run = FinishedRun(
        title, training, seed, dataset, queries, gallery, history, facts, lambda: load_system(training, seed, dataset, trained, epoch)
    )
    scores: dict[str, float] = {}
    for name, options in measurements.items():
        own = folder / MEASUREMENTS_FOLDER / name
        own.mkdir(parents=True, exist_ok=True)
        scores |= measurement(name).measure(run, parse_measurement(name, options), own)
    return scores


def load_system(training: TrainingConfig, seed: int, dataset: Path, trained: Path, epoch: Epoch = "last") -> TrainingSystem:
    """Load the model and loss of a run with the weights of an epoch, on the CPU, in evaluation mode; a heated loss is as hot as then.

    Raises:
        StoreError: `trained` has no complete checkpoint, or the checkpoint does not have the epoch.
    """
    checkpoint = load_checkpoint(trained)
    if checkpoint is None:
        raise StoreError(f"{trained}: the checkpoint of the trained network is gone; start the same command again, and it is trained again")
    num_classes = len(open_role(dataset, "train", training.validation).class_names)
    system = build_system(training.without_weights(), num_classes, seed, torch.device("cpu"))
    weights, num_epochs_done = weights_of(checkpoint, epoch)
    system.load_state_dict(weights)
    if num_epochs_done:
        system.loss.start_epoch(num_epochs_done - 1, training.num_epochs)
    return system.eval()
