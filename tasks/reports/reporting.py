"""Write a comparison's report from the scores of its runs: files for DVC and text for readers."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Column, Table

from dml_core.errors import EvaluationError
from dml_core.evaluation.metric_info import HEADLINES, metric_info, recall_k, table_columns
from dml_core.evaluation.statistics.comparing import LEVEL, Comparison, compare, tested_on
from dml_core.evaluation.statistics.confidence import Summary, summarise
from dml_core.evaluation.statistics.mean_ranks import rank_systems
from dml_core.evaluation.statistics.paired import MIN_CLASSES, difference_over_classes
from dml_core.figures.mean_ranks import plot_mean_ranks
from dml_core.figures.over_epochs import plot_over_epochs
from dml_core.figures.recalls import plot_recalls
from tasks.files import write_whole
from tasks.runs.comparable import scores_by_seed
from tasks.runs.finished import made_by_older_code
from tasks.runs.records import MetricRecord
from tasks.runs.specs import RunSpec

if TYPE_CHECKING:
    from dml_core.data.check import CheckReport

METRICS_FOLDER, PLOTS_FILE, SCORES_FILE = "metrics", "recall.csv", "scores.csv"
REPORT_FILE, FIGURE_FILE, EPOCHS_FILE = "report.md", "recall.png", "epochs.png"
DIFFERENCES_FOLDER, DIFFERENCES_FILE, RANKS_FILE = "differences", "differences.md", "ranks.png"


def summarise_runs(runs: Sequence[tuple[RunSpec, MetricRecord]]) -> dict[str, dict[str, Summary]]:
    """Return variant -> metric -> summary over the variant's seeds, in the order of the runs.

    Raises:
        EvaluationError: two runs have the same variant and seed, or runs of one variant differ in more than the seed.
    """
    check_comparable(runs)
    names = {spec.variant: record.metrics.keys() for spec, record in reversed(runs)}
    by_name = {name: _scores(runs, name) for name in dict.fromkeys(name for _, record in runs for name in record.metrics)}
    return {
        variant: {name: summarise(list(by_name[name][variant].values())) for name in names[variant]}
        for variant in dict.fromkeys(spec.variant for spec, _ in runs)
    }


def check_comparable(runs: Sequence[tuple[RunSpec, MetricRecord]]) -> None:
    """Check that the mean of these runs is meaningful.

    Raises:
        EvaluationError: the runs are of several datasets, or runs of one variant differ in more than the seed.
    """
    if len({spec.dataset for spec, _ in runs}) > 1:
        raise EvaluationError("a comparison is of runs on one dataset")
    first: dict[str, RunSpec] = {}
    for spec, _ in runs:
        if first.setdefault(spec.variant, spec).model_copy(update={"seed": spec.seed}) != spec:
            raise EvaluationError(f"{spec.variant}: seeds {first[spec.variant].seed} and {spec.seed} ran with different settings")


def write_report(
    title: str,
    runs: Sequence[tuple[RunSpec, MetricRecord]],
    folder: Path,
    older_code: Mapping[str, Sequence[str]] | None = None,
    reference: str | None = None,
) -> str:
    """Write a comparison's files into `folder` and return the report's text. They do not depend on when or where the runs were made.

    `metrics/<variant>.json`: means of the HEADLINES, for `dvc metrics`, which shows one row per file; `recall.csv`: means of Recall@K, for
    `dvc plots`; `scores.csv`: every metric with its mean, interval and seeds; `report.md`, `recall.png` and, if the runs measured it,
    `epochs.png` (Recall@1 over epochs): for readers, starting with the significant differences; `differences/`: every pair of variants, and
    their ranks.

    Args:
        title: title of the comparison.
        runs: its runs and their scores.
        folder: created if missing.
        older_code: variant -> source files that differ from those that made its runs; their rows are marked.
        reference: variant that the others are compared with; by default the best.
    """
    summaries = summarise_runs(runs)
    folder.mkdir(parents=True, exist_ok=True)
    _write_metrics(summaries, folder / METRICS_FOLDER)
    recalls = {variant: recall_by_k({name: summary.mean for name, summary in metrics.items()}) for variant, metrics in summaries.items()}
    rows = [[variant, str(k), f"{value:.6f}"] for variant, by_k in recalls.items() for k, value in by_k.items()]
    _write_csv(folder / PLOTS_FILE, [["variant", "k", "recall"], *rows])
    _write_csv(folder / SCORES_FILE, _score_rows(runs, summaries))
    plot_recalls(_recalls_of_seeds(runs), folder / FIGURE_FILE, title)
    curves = _recall_over_epochs(runs)
    (folder / EPOCHS_FILE).unlink(missing_ok=True)
    if curves:
        plot_over_epochs(curves, folder / EPOCHS_FILE, f"{title}: Recall@1 over epochs")
    found = compare_runs(runs, reference)
    _write_differences(title, runs, found, folder / DIFFERENCES_FOLDER)
    wider = _said_of_other_classes(runs, found)
    num_seeds, role = len({spec.seed for spec, _ in runs}), runs[0][0].evaluation.role
    text = _markdown(title, summaries, found, num_seeds, role, older_code or {}, wider, bool(curves))
    write_whole(folder / REPORT_FILE, text)
    return text


def compare_runs(runs: Sequence[tuple[RunSpec, MetricRecord]], reference: str | None = None) -> Comparison | None:
    """Compare the variants of one dataset by their first metric, in per cent; None for one variant."""
    check_comparable(runs)
    first = table_columns(runs[0][1].metrics)[0]
    return compare(runs[0][0].dataset, first, _scores(runs, first, 100), reference, **tested_on(runs[0][1].metrics))


def _scores(runs: Sequence[tuple[RunSpec, MetricRecord]], metric: str, factor: float = 1.0) -> dict[str, dict[int, float]]:
    return scores_by_seed((spec.variant, spec.seed, factor * record.metrics[metric]) for spec, record in runs if metric in record.metrics)


def _write_differences(title: str, runs: Sequence[tuple[RunSpec, MetricRecord]], found: Comparison | None, folder: Path) -> None:
    """Write every pair of variants and, for at least three variants and two seeds, their ranks over the seeds."""
    folder.mkdir(exist_ok=True)
    (folder / RANKS_FILE).unlink(missing_ok=True)
    lines = [f"# {title}: differences", ""]
    if found is None:
        lines += ["One variant alone is compared with nothing.", ""]
    else:
        lines += [found.sentence, *([found.limits] if found.limits else []), ""]
        title = metric_info(found.metric).title
        lines += [f"{title} of the row less that of the column, in points, with half of the 95 % interval. Intervals"]
        lines += [
            f"and tests hold for all {len(found.pairs)} pairs at once (paired t, Bonferroni). Bold: they differ significantly.",
            "",
        ]
        lines += [*_matrix(found), "", *_posteriors(found), *_population(runs, found)]
        ranking = rank_systems(found.metric, {found.dataset: _scores(runs, found.metric, 100)})
        if ranking is not None:
            plot_mean_ranks(ranking, folder / RANKS_FILE)
            lines += [ranking.sentence, "", f"![Mean ranks]({RANKS_FILE})", ""]
    write_whole(folder / DIFFERENCES_FILE, "\n".join(lines))


def _matrix(found: Comparison) -> list[str]:
    rows = [["less", *found.means]]
    for system, pairs in found.matrix:
        said = ["" if pair is None else f"**{found.said(pair)}**" if pair.is_significant else found.said(pair) for pair in pairs]
        rows.append([system, *said])
    return _aligned(rows)


def _posteriors(found: Comparison) -> list[str]:
    """Return the probabilities of every system compared with the reference or the best mean."""
    rows = [[pair.system, *(f"{share:.2f}" for share in pair.posterior)] for pair in found.against if pair.posterior is not None]
    if not rows:
        return []
    heading = f"Beside {found.reference}: the probability that the true mean is more than {found.points:g} point higher, within"
    lines = [f"{heading} {found.points:g} point,", "and more than that lower. Of each pair alone (t posterior of the paired differences)."]
    return [*lines, "", *_aligned([["system", "P(better)", "P(practically equal)", "P(worse)"], *rows]), ""]


def _over_classes(runs: Sequence[tuple[RunSpec, MetricRecord]], found: Comparison) -> dict[str, str]:
    """Return system -> difference to the reference or the best mean, with a simultaneous interval over seeds and classes."""
    recalls = {(spec.variant, spec.seed): record.class_recalls for spec, record in runs}
    classes = sorted({label for of in recalls.values() for label in of})
    said = {}
    for pair in found.against if found.metric == "recall@1" and classes else ():
        names = (pair.system, pair.other)
        sides = [[[recalls[name, seed].get(label, math.nan) for label in classes] for seed in pair.seeds] for name in names]
        values, references = (100 * np.array(side) for side in sides)
        wider = difference_over_classes(values, references, LEVEL / len(found.against)) if pair.half_width is not None else None
        if wider is not None and math.isfinite(wider[1]):
            said[pair.system] = f"{found.figure(wider[0])} ± {wider[1]:.{found.decimals}f}"
    return said


def _population(runs: Sequence[tuple[RunSpec, MetricRecord]], found: Comparison) -> list[str]:
    """Return a table of the differences with intervals on these classes and over seeds and classes."""
    wider = _over_classes(runs, found)
    rows = [[pair.system, found.said(pair), wider[pair.system]] for pair in found.against if pair.system in wider]
    if not rows:
        return []
    head = ["system", f"on these {found.num_classes or 'test'} classes", "over seeds and classes"]
    said = f"Beside {found.reference}: the interval on these classes is about other seeds, that over seeds and classes about other"
    return [said, "classes of the same kind too (mean of the classes; all rows at once).", "", *_aligned([head, *rows]), ""]


def _said_of_other_classes(runs: Sequence[tuple[RunSpec, MetricRecord]], found: Comparison | None) -> str | None:
    """Return a sentence on whether the lead holds for other classes, or None if nothing is known."""
    if found is None or not found.to_best:
        return None
    if found.num_classes is not None and found.num_classes < MIN_CLASSES:
        return f"Nothing is claimed of other classes: {found.num_classes} test classes are too few."
    wider = _over_classes(runs, found)
    lead = found.best if found.reference != found.best else next(iter(wider), found.best)
    if lead not in wider:
        return None
    return f"Over seeds and classes, for other classes of the same kind: {lead} less {found.reference} {wider[lead]}."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table whose columns are padded to their widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    return [padded[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *padded[1:]]


def recall_by_k(metrics: dict[str, float]) -> dict[int, float]:
    """Return K -> Recall@K, in ascending order of K."""
    return dict(sorted((k, value) for name, value in metrics.items() if (k := recall_k(name)) is not None))


def check_table(name: str, report: "CheckReport") -> Table:
    """Return the result of a check of raw files for the terminal: counts and published counts, notes, violations."""
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


def _write_metrics(summaries: dict[str, dict[str, Summary]], folder: Path) -> None:
    """Write one file per variant; remove files of variants that are no longer in the comparison."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.json"):
        if path.stem not in summaries:
            path.unlink()
    for variant, metrics in summaries.items():
        means = {name: round(metrics[name].mean, 6) for name in HEADLINES if name in metrics}
        write_whole(folder / f"{variant}.json", json.dumps(means, indent=2) + "\n")


def _score_rows(runs: Sequence[tuple[RunSpec, MetricRecord]], summaries: dict[str, dict[str, Summary]]) -> list[list[str]]:
    """Return a header and a row per variant and metric: mean, half of the 95 % interval, each seed's value; missing values are empty."""
    seeds = sorted({spec.seed for spec, _ in runs})
    measured = {(spec.variant, spec.seed): record.metrics for spec, record in runs}
    rows = [["variant", "metric", "mean", "half_width", *(f"seed_{seed}" for seed in seeds)]]
    for variant, metrics in summaries.items():
        for name, summary in metrics.items():
            of_seeds = [measured.get((variant, seed), {}).get(name) for seed in seeds]
            rows.append(
                [variant, name, *("" if value is None else f"{value:.6f}" for value in (summary.mean, summary.half_width, *of_seeds))]
            )
    return rows


def _recalls_of_seeds(runs: Sequence[tuple[RunSpec, MetricRecord]]) -> dict[str, dict[int, list[float]]]:
    """Return variant -> K -> Recall@K of each seed."""
    recalls: dict[str, dict[int, list[float]]] = {}
    for spec, record in runs:  # each seed once: `summarise_runs` has checked it
        for k, value in recall_by_k(record.metrics).items():
            recalls.setdefault(spec.variant, {}).setdefault(k, []).append(value)
    return recalls


def _recall_over_epochs(runs: Sequence[tuple[RunSpec, MetricRecord]]) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Return variant -> role -> epochs done -> Recall@1 of each seed, for the variants whose runs measured it."""
    curves: dict[str, dict[str, dict[int, list[float]]]] = {}
    for spec, record in runs:
        for role, curve in record.recall_by_epoch.items():
            for epoch, recall in curve.items():
                curves.setdefault(spec.variant, {}).setdefault(role, {}).setdefault(epoch, []).append(recall)
    return curves


def _write_csv(path: Path, rows: list[list[str]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_whole(path, text.getvalue())


def _markdown(
    title: str,
    summaries: dict[str, dict[str, Summary]],
    found: Comparison | None,
    num_seeds: int,
    role: str,
    older_code: Mapping[str, Sequence[str]],
    other_classes: str | None,
    has_curves: bool,
) -> str:
    columns = table_columns(next(iter(summaries.values())))
    spread = f"mean ± half of the 95 % interval over {num_seeds} seeds" if num_seeds > 1 else "one seed"
    bold = found.best_set if found is not None else frozenset()
    rows = [["variant", *columns, *([found.heading] if bold and found else [])]]
    for variant, metrics in summaries.items():
        name, first = variant, str(metrics[columns[0]])
        if variant in bold:
            name, first = f"**{name}**", f"**{first}**"
        if variant in older_code:
            name += " (older code)"
        others = [str(metrics[column]) for column in columns[1:]]
        rows.append([name, first, *others, *([found.beside(variant)] if bold and found else [])])
    lines = [f"# {title}", ""]
    if found is not None:
        lines += [" ".join(said for said in (found.sentence, other_classes, found.limits) if said), ""]
    lines += [f"Per cent, {role} classes, {spread}.{f' {found.bold_says}' if bold and found else ''}"]
    lines += ["", *_aligned(rows)]
    notes = [line for variant, files in older_code.items() for line in ("", f"{variant}: {made_by_older_code(files)}.")]
    differences = f"[Every pair of variants, intervals for other classes, and ranks]({DIFFERENCES_FOLDER}/{DIFFERENCES_FILE})"
    curves = ["", f"![Recall@1 over epochs]({EPOCHS_FILE})"] if has_curves else []
    return "\n".join([*lines, *notes, "", f"![Recall@K]({FIGURE_FILE})", *curves, "", differences, ""])
