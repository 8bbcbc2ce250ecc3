"""Training time of a run (discriminative loss, Table 7): the only measurement that depends on the machine and is never the same twice.

It is the workers' time for the training step: from opening the dataset to the last checkpoint, including the mining of hard images. Minutes
on two machines are not comparable, nor are those of runs trained at the same time on one; the ratio of two runs trained one after the other
on one machine is. No identity depends on it, and a reused run keeps its time.
"""

from pathlib import Path

from dml_core.config import Config
from dml_core.measurements.contract import FinishedRun

METRICS = ("training_minutes", "epoch_minutes")


def measure(run: FinishedRun, options: Config, folder: Path) -> dict[str, float]:
    """Return minutes of the whole training and per epoch; empty for a resumed run, whose earlier time is unknown."""
    num_epochs = run.training.num_epochs
    if "seconds" not in run.facts or run.facts.get("taken_up") or num_epochs == 0:
        return {}
    minutes = float(run.facts["seconds"]) / 60
    return {"training_minutes": minutes, "epoch_minutes": minutes / num_epochs}
