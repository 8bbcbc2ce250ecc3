"""Final softmax loss: its mean over the steps of the last epoch (SGSL, introduction and section 3)."""

from pathlib import Path

import numpy as np

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.measurements.contract import FinishedRun

METRICS = ("last_softmax",)


def measure(run: FinishedRun, options: Config, folder: Path) -> dict[str, float]:
    """Return the mean of the loss's part `softmax`, in nats.

    Raises:
        EvaluationError: the run has no epochs, or its loss has no such part.
    """
    steps = [step for step in run.history if step["epoch"] == run.training.num_epochs - 1]
    if not steps or "softmax" not in steps[0]:
        raise EvaluationError(f"{run.title}: the loss '{run.training.loss.name}' has no softmax part in {run.training.num_epochs} epochs")
    return {METRICS[0]: float(np.mean([step["softmax"] for step in steps]))}
