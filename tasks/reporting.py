"""A comparison's report from the scores of its runs: what DVC tracks, what a person reads."""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.table import Column, Table

from dml_core.evaluation.confidence import mean_over_seeds
from dml_core.figures.curves import plot_recall_curves
from tasks.records import MetricRecord
from tasks.specs import RunSpec

if TYPE_CHECKING:
    from dml_core.data.check import CheckReport

METRICS_FILE, PLOTS_FILE, REPORT_FILE, FIGURE_FILE = "metrics.json", "recall.csv", "report.md", "recall.png"


@dataclass(frozen=True)
class Summary:
    """A metric over the seeds of one variant: mean and half-width of the 95 % interval (Student's t); no interval for one seed."""

    mean: float
    half_width: float | None
    num_seeds: int

    def __str__(self) -> str:
        spread = f" ± {100 * self.half_width:.1f}" if self.half_width is not None else ""
        return f"{100 * self.mean:.1f}{spread}"


def summarise(values: Sequence[float]) -> Summary:
    """Mean and 95 % interval of one metric over seeds."""
    mean, half_width = mean_over_seeds(values)
    return Summary(mean, half_width if len(values) > 1 else None, len(values))


def summarise_runs(runs: Sequence[tuple[RunSpec, MetricRecord]]) -> dict[str, dict[str, Summary]]:
    """Variant -> metric -> summary over the variant's seeds, in the order of the runs."""
    by_variant: dict[str, list[dict[str, float]]] = {}
    for spec, record in runs:
        by_variant.setdefault(spec.variant, []).append(record.metrics)
    return {variant: {name: summarise([metrics[name] for metrics in seeds]) for name in seeds[0]} for variant, seeds in by_variant.items()}


def write_report(title: str, runs: Sequence[tuple[RunSpec, MetricRecord]], folder: Path) -> str:
    """Write `metrics.json` and `recall.csv` (DVC's metrics and plots), `recall.png` and `report.md` into `folder`; returns the text.

    Nothing in them depends on when or where the runs were made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summaries = summarise_runs(runs)
    means = {variant: {name: round(summary.mean, 6) for name, summary in metrics.items()} for variant, metrics in summaries.items()}
    (folder / METRICS_FILE).write_text(json.dumps(means, indent=2) + "\n")
    recalls = {variant: recall_by_k({name: summary.mean for name, summary in metrics.items()}) for variant, metrics in summaries.items()}
    with (folder / PLOTS_FILE).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["variant", "k", "recall"])
        writer.writerows([variant, k, f"{value:.6f}"] for variant, by_k in recalls.items() for k, value in by_k.items())
    plot_recall_curves(recalls, folder / FIGURE_FILE, title)
    text = _markdown(title, summaries, len({spec.seed for spec, _ in runs}), runs[0][0].evaluation.role)
    (folder / REPORT_FILE).write_text(text)
    return text


def recall_by_k(metrics: dict[str, float]) -> dict[int, float]:
    """Recall@K by K, K rising."""
    found = {int(k): value for name, value in metrics.items() if (k := name.removeprefix("recall@")) != name and k.isdigit()}
    return dict(sorted(found.items()))


def report_columns(summaries: dict[str, dict[str, Summary]]) -> list[str]:
    """The metrics that a table shows: every Recall@K, then MAP@R, R-precision and NMI where they were measured."""
    first = {name: summary.mean for name, summary in next(iter(summaries.values())).items()}
    return [*(f"recall@{k}" for k in recall_by_k(first)), *(name for name in ("map@r", "r_precision", "nmi") if name in first)]


def comparison_table(title: str, runs: pd.DataFrame) -> Table:
    """A comparison's published runs side by side for the terminal: a row a variant, mean and interval over its seeds.

    Args:
        title: over the table.
        runs: columns variant and seed, and one for each metric (`Tracker.comparison_table`).
    """
    ks = sorted(int(name.removeprefix("recall_at_")) for name in runs.columns if re.fullmatch(r"recall_at_\d+", name))
    names = [*(f"recall_at_{k}" for k in ks), *(name for name in ("map_at_r", "r_precision", "nmi") if name in runs.columns)]
    table = Table(
        Column("variant", min_width=max(map(len, runs["variant"]))),
        "seeds",
        *(name.replace("_at_", "@") for name in names),
        title=title,
    )
    for variant, rows in runs.groupby("variant", sort=False):
        measured = [[float(value) for value in rows[name].dropna()] for name in names]
        table.add_row(str(variant), str(len(rows)), *(str(summarise(values)) if values else "-" for values in measured))
    return table


def check_table(name: str, report: "CheckReport") -> Table:
    """What a check of raw files found, for the terminal: counts beside the published ones, notes, violations."""
    table = Table("what", "found", Column("published or examples", overflow="fold"), title=f"{name}: raw files")
    for role, counts in report.counts.items():
        published = report.published.get(role)
        beside = f"{published.num_images} images of {published.num_classes} classes" if published else "nothing published"
        smallest, largest = report.class_sizes[role]
        each = f"{smallest}" if smallest == largest else f"{smallest} to {largest}"
        table.add_row(role, f"{counts.num_images} images of {counts.num_classes} classes, {each} of each", beside)
    for kind, findings in (("note", report.notes), ("VIOLATION", report.violations)):
        for finding in findings:
            table.add_row(f"{kind}: {finding.what}", str(finding.num_found), "\n".join(finding.examples))
    return table


def _markdown(title: str, summaries: dict[str, dict[str, Summary]], num_seeds: int, role: str) -> str:
    columns = report_columns(summaries)
    spread = f"mean ± half of the 95 % interval over {num_seeds} seeds" if num_seeds > 1 else "one seed"
    rows = [["variant", *columns], *([variant, *(str(metrics[name]) for name in columns)] for variant, metrics in summaries.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns) + 1)]
    padded = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    lines = [f"# {title}", "", f"Per cent, {role} classes, {spread}.", "", padded[0], rule, *padded[1:]]
    return "\n".join([*lines, "", f"![Recall@K]({FIGURE_FILE})", ""])
