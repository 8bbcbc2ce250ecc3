"""Separation of the training classes: SGSL's CSC (eq. 9) of the training images."""

from pathlib import Path

from dml_core.config import Config
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.separability import class_separability
from dml_core.measurements.contract import FinishedRun

METRICS = ("csc_train",)


def measure(run: FinishedRun, options: Config, folder: Path) -> dict[str, float]:
    """Return the CSC of the unchanged embeddings, as of the test classes and without augmentation; empty if no class has a spread."""
    scored = run.training_images
    separability = class_separability(as_points(scored.embeddings, "euclidean"), scored.labels)
    return {METRICS[0]: separability["csc"]} if "csc" in separability else {}
