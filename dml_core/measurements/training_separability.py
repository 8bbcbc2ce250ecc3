"""How far the training classes lie apart: SGSL's CSC (eq. 9) of the images that the network was trained on."""

from pathlib import Path

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.evaluation.geometry import as_points
from dml_core.evaluation.separability import class_separability
from dml_core.measurements.contract import FinishedRun

METRICS = ("csc_train",)


class Options(Config):
    """None."""


def measure(run: FinishedRun, options: Options, folder: Path) -> dict[str, float]:
    """As the evaluator measures it of the test classes: embeddings as the network gives them, without augmentation.

    Raises:
        EvaluationError: nothing scatters within the classes.
    """
    scored = run.training_images
    found = class_separability(as_points(scored.embeddings, "euclidean"), scored.labels)
    if "csc" not in found:
        raise EvaluationError(f"{run.title}: all training images of a class have one embedding, and CSC has no value")
    return {METRICS[0]: found["csc"]}
