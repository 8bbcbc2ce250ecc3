"""The table of `docs/results.md`: rows of losses and their twins, trained on one small dataset with several seeds, as Markdown."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from dml_core.config import Config, merge, parse
from dml_core.evaluation.confidence import mean_over_seeds
from dml_core.losses.registry import parse_loss_options
from dml_core.training.config import TrainingConfig
from tasks.runs.specs import DatasetSpec
from tasks.side.local_runs import train_here
from tasks.side.side_by_side import side_by_side

METRICS = {"recall@1": "R@1", "map@r": "MAP@R", "nmi": "NMI"}
UNTRAINED = "untrained"
Scores = dict[str, list[float]]


class Row(Config):
    """One loss.

    Attributes:
        training: its changes to the protocol.
        twin: changes that put pytorch-metric-learning's implementation of the same loss in its place.
        twin_differs: in what the twin is not the same loss, where no options of the library make it so; printed below the table.
    """

    training: dict[str, Any]
    twin: dict[str, Any] | None = None
    twin_differs: str | None = None


class ResultsSpec(Config):
    """`flows/tables/fashion_mnist.yaml`.

    Attributes:
        chosen: how the budget was chosen, for the page.
    """

    chosen: str
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
        where = f"fashion_mnist.yaml: {row}{' (twin)' if twin else ''}"
        config = parse(TrainingConfig, merge(self.protocol, changes), where)
        parse_loss_options(config.loss.name, config.loss.options, f"{where}: loss")
        return config


def measure(spec: ResultsSpec, packed: Path, watch: Callable[[str], None]) -> dict[tuple[str, bool], Scores]:
    """Scores by seed of every row and of every twin: (row, is twin) -> metric -> values. Runs go side by side, one on each core."""
    runs = [(row, twin) for row, settings in spec.rows.items() for twin in ((False, True) if settings.twin is not None else (False,))]
    jobs = [(row, twin, seed) for seed in spec.seeds for row, twin in runs]
    scores: dict[tuple[str, bool, int], dict[str, float]] = {}
    for job, found in side_by_side(partial(_scores, spec, packed), jobs):
        scores[job] = found
        watch(f"{len(scores)} of {len(jobs)}: {job[0]}{' (twin)' if job[1] else ''}, seed {job[2]}: R@1 {100 * found['recall@1']:.1f}")
    return {run: {metric: [scores[*run, seed][metric] for seed in spec.seeds] for metric in METRICS} for run in runs}


def _scores(spec: ResultsSpec, packed: Path, job: tuple[str, bool, int]) -> dict[str, float]:
    """Test scores of one run: row, whether it is the twin, seed."""
    row, twin, seed = job
    scores = train_here(spec.training_config(row, twin), packed, seed).scores()
    return {metric: float(scores[metric]) for metric in METRICS}


def table(spec: ResultsSpec, found: dict[tuple[str, bool], Scores]) -> str:
    """The rows as Markdown: per metric the mean and half the 95 % interval in per cent, and whether a row is within noise of its twin."""
    header = ["loss", *METRICS.values(), "twin's R@1", "row less twin", "within noise"]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    notes: list[str] = []
    for row, settings in spec.rows.items():
        cells = [_cell(found[row, False][metric]) for metric in METRICS]
        beside = _beside(found[row, False]["recall@1"], found[row, True]["recall@1"]) if (row, True) in found else ["", "", ""]
        if settings.twin_differs:
            notes.append(f"({len(notes) + 1}) Not the same loss: {settings.twin_differs}")
            beside[0] += f" ({len(notes)})"
        lines.append(f"| {' | '.join([row, *cells, *beside])} |")
    return "\n".join([*lines, *(f"\n{note}" for note in notes)])


def against_untrained(spec: ResultsSpec, found: dict[tuple[str, bool], Scores]) -> str:
    """How many trained rows are better and worse than the untrained network, by metric, as a sentence."""
    rows = [row for row in spec.rows if row != UNTRAINED]
    counts = []
    for metric, name in METRICS.items():
        differences = [np.subtract(found[row, False][metric], found[UNTRAINED, False][metric]).tolist() for row in rows]
        intervals = [mean_over_seeds(values) for values in differences]
        better, worse = (sum(sign * mean > half for mean, half in intervals) for sign in (1, -1))
        counts.append(f"in {name} {better} better and {worse} worse")
    return f"Of {len(rows)} rows, beside `{UNTRAINED}` from the same seeds (0 outside the 95 % interval): {'; '.join(counts)}."


def _beside(values: list[float], twins: list[float]) -> list[str]:
    """The twin, the paired difference over seeds, and whether its interval holds 0."""
    mean, half = mean_over_seeds([value - twin for value, twin in zip(values, twins, strict=True)])
    return [_cell(twins), f"{100 * mean:+.1f} ± {100 * half:.1f}", "yes" if abs(mean) <= half else "no"]


def _cell(values: list[float]) -> str:
    mean, half = mean_over_seeds(values)
    return f"{100 * mean:.1f} ± {100 * half:.1f}"
