"""The table of `docs/results.md`: rows of losses and their twins, trained on one small dataset with several seeds, as Markdown."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from dml_core.config import Config, merge, parse
from dml_core.evaluation.confidence import mean_over_seeds
from dml_core.losses.registry import parse_loss_options
from dml_core.training.config import TrainingConfig
from tasks.local_runs import train_here
from tasks.specs import DatasetSpec

METRICS = {"recall@1": "R@1", "map@r": "MAP@R", "nmi": "NMI"}
Scores = dict[str, list[float]]


class Row(Config):
    """One loss.

    Attributes:
        training: its changes to the protocol.
        twin: changes that put pytorch-metric-learning's implementation of the same loss in its place.
    """

    training: dict[str, Any]
    twin: dict[str, Any] | None = None


class ResultsSpec(Config):
    """`flows/results.yaml`."""

    dataset: DatasetSpec
    seeds: tuple[int, ...] = Field(min_length=2)
    protocol: dict[str, Any]
    rows: dict[str, Row]

    def training_config(self, row: str, twin: bool = False) -> TrainingConfig:
        """The training settings of a row or of its twin.

        Raises:
            ConfigError: settings that do not fit.
        """
        changes = self.rows[row].twin if twin else self.rows[row].training
        assert changes is not None
        where = f"results.yaml: {row}{' (twin)' if twin else ''}"
        config = parse(TrainingConfig, merge(self.protocol, changes), where)
        parse_loss_options(config.loss.name, config.loss.options, f"{where}: loss")
        return config


def measure(spec: ResultsSpec, packed: Path, watch: Callable[[str], None]) -> dict[tuple[str, bool], Scores]:
    """Scores by seed of every row and of every twin: (row, is twin) -> metric -> values."""
    found: dict[tuple[str, bool], Scores] = {}
    for row, settings in spec.rows.items():
        for twin in (False, True) if settings.twin is not None else (False,):
            runs = [train_here(spec.training_config(row, twin), packed, seed).scores() for seed in spec.seeds]
            found[row, twin] = {metric: [float(run[metric]) for run in runs] for metric in METRICS}
            watch(f"{row}{' (twin)' if twin else ''}: {_cell(found[row, twin]['recall@1'])}")
    return found


def table(spec: ResultsSpec, found: dict[tuple[str, bool], Scores]) -> str:
    """The rows as Markdown: per metric the mean and half the 95 % interval in per cent, and whether a row is within noise of its twin."""
    header = ["loss", *METRICS.values(), "twin's R@1", "row less twin", "within noise"]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for row in spec.rows:
        cells = [_cell(found[row, False][metric]) for metric in METRICS]
        beside = _beside(found[row, False]["recall@1"], found[row, True]["recall@1"]) if (row, True) in found else ["", "", ""]
        lines.append(f"| {' | '.join([row, *cells, *beside])} |")
    return "\n".join(lines)


def _beside(values: list[float], twins: list[float]) -> list[str]:
    """The twin, the paired difference over seeds, and whether its interval holds 0."""
    mean, half = mean_over_seeds([value - twin for value, twin in zip(values, twins, strict=True)])
    return [_cell(twins), f"{100 * mean:+.1f} ± {100 * half:.1f}", "yes" if abs(mean) <= half else "no"]


def _cell(values: list[float]) -> str:
    mean, half = mean_over_seeds(values)
    return f"{100 * mean:.1f} ± {100 * half:.1f}"
