"""How long a run trained (discriminative loss, Table 7): the one measurement that is of the machine too, and never the same twice.

It is the time that the workers took for the training step: from opening the dataset to the last checkpoint, with the mining of hard images
where there is any. Minutes of two machines do not compare, nor do runs that trained side by side on one; what carries over is the ratio of
two rows that one machine ran one after the other. No identity depends on it, and a run that is reused keeps its time.
"""

from pathlib import Path

from dml_core.config import Config
from dml_core.measurements.contract import FinishedRun

METRICS = ("training_minutes", "epoch_minutes")


class Options(Config):
    """None."""


def measure(run: FinishedRun, options: Options, folder: Path) -> dict[str, float]:
    """Minutes of the whole training and of an epoch; nothing for a run that went on from a checkpoint, whose earlier time is not known."""
    num_epochs = run.training.num_epochs
    if "seconds" not in run.facts or run.facts.get("taken_up") or num_epochs == 0:
        return {}
    minutes = float(run.facts["seconds"]) / 60
    return {"training_minutes": minutes, "epoch_minutes": minutes / num_epochs}
