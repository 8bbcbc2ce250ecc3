"""Separation of the training classes: SGSL's CSC (eq. 9) of the training images."""

from pathlib import Path

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.separability import class_separability
from dml_core.measurements.contract import FinishedRun

METRICS = ("csc_train",)


def measure(run: FinishedRun, options: Config, folder: Path) -> dict[str, float]:
    """Return the CSC as the evaluator does for the test classes: unchanged embeddings, without augmentation.

    Raises:
        EvaluationError: no class has a spread.
    """
    scored = run.training_images
    separability = class_separability(as_points(scored.embeddings, "euclidean"), scored.labels)
    if "csc" not in separability:
        raise EvaluationError(f"{run.title}: all training images of a class have one embedding, and CSC has no value")
    return {METRICS[0]: separability["csc"]}
