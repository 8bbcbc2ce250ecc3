"""Write the report of a comparison of variants on one dataset from the scores of its runs: files for DVC, and text for readers."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dml_core.errors import EvaluationError
from dml_core.evaluation.metric_info import HEADLINES, recall_k, table_columns
from dml_core.evaluation.statistics.comparing import BOLD, Comparison, compare, tested_on
from dml_core.evaluation.statistics.mean_ranks import rank_systems
from dml_core.evaluation.statistics.over_seeds import Summary, says_seeds, summarise_seeds
from dml_core.evaluation.statistics.paired import MIN_CLASSES, difference_over_classes
from tasks.files import write_whole
from tasks.reports.kit import render
from tasks.runs.comparable import scores_by_seed
from tasks.runs.finished import made_by_older_code
from tasks.runs.records import MetricRecord
from tasks.runs.specs import RunSpec

METRICS_FOLDER, SCORES_FILE = "metrics", "scores.csv"
REPORT_FILE, FIGURE_FILE, EPOCHS_FILE = "report.md", "recall.png", "epochs.png"
DIFFERENCES_FOLDER, DIFFERENCES_FILE, RANKS_FILE = "differences", "differences.md", "ranks.png"
Summaries = dict[str, dict[str, Summary]]
Recorded = Sequence[tuple[RunSpec, MetricRecord]]
Scored = Sequence[tuple[RunSpec, Mapping[str, float]]]  # with the metrics of each run


def summarise_runs(runs: Scored) -> Summaries:
    """Return variant -> metric -> summary over the variant's seeds, in the order of the runs.

    Raises:
        EvaluationError: two runs have the same variant and seed, runs of one variant differ in more than the seed, or the runs are of
            several datasets.
    """
    _check_comparable(runs)
    names = {spec.variant: metrics.keys() for spec, metrics in reversed(runs)}
    scores = {name: _scores(runs, name) for name in dict.fromkeys(name for _, metrics in runs for name in metrics)}
    return {
        variant: {name: summarise_seeds(list(scores[name][variant].values())) for name in names[variant]}
        for variant in dict.fromkeys(spec.variant for spec, _ in runs)
    }


def compare_runs(runs: Scored, reference: str | None = None) -> Comparison | None:
    """Compare the variants of one dataset by their first metric, in per cent, paired by seed; None for one variant.

    Raises:
        EvaluationError: as `summarise_runs`.
    """
    _check_comparable(runs)
    spec, metrics = runs[0]
    first = table_columns(metrics)[0]
    return compare(spec.dataset, first, _scores(runs, first, 100), reference, **tested_on(metrics))


def _check_comparable(runs: Scored) -> None:
    if len({spec.dataset for spec, _ in runs}) > 1:
        raise EvaluationError("a comparison is of runs on one dataset")
    first: dict[str, RunSpec] = {}
    for spec, _ in runs:
        if first.setdefault(spec.variant, spec).model_copy(update={"seed": spec.seed}) != spec:
            raise EvaluationError(f"{spec.variant}: seeds {first[spec.variant].seed} and {spec.seed} ran with different settings")


def _scores(runs: Scored, metric: str, factor: float = 1.0) -> dict[str, dict[int, float]]:
    return scores_by_seed((spec.variant, spec.seed, factor * metrics[metric]) for spec, metrics in runs if metric in metrics)


def write_report(
    title: str,
    runs: Recorded,
    folder: Path,
    older_code: Mapping[str, Sequence[str]] = {},
    reference: str | None = None,
) -> str:
    """Write a comparison's files into `folder` and return the report's text. They do not depend on when or where the runs were made.

    `metrics/<variant>.json`: means of the HEADLINES, for `dvc metrics`, which shows one row per file; `scores.csv`: every metric with its
    mean, interval and seeds; `report.md`, `recall.png` (of `dvc plots`, too) and, if the runs measured it, `epochs.png` (Recall@1 over
    epochs): for readers, starting with the significant differences; `differences/`: every pair of variants, and their ranks.

    The others are compared with the variant `reference`, by default the best. `older_code` is variant -> source files that differ from
    those that made its runs; their rows are marked.
    """
    scored = [(spec, record.metrics) for spec, record in runs]
    summaries, comparison = summarise_runs(scored), compare_runs(scored, reference)
    folder.mkdir(parents=True, exist_ok=True)
    _write_metrics(summaries, folder / METRICS_FOLDER)
    _write_scores(scored, summaries, folder / SCORES_FILE)
    has_curves = _draw_figures(title, runs, folder)
    over_classes = {} if comparison is None else _over_classes(runs, comparison)
    _write_differences(title, scored, comparison, over_classes, folder / DIFFERENCES_FOLDER)
    text = render(
        "report.md",
        title=title,
        conclusions=[] if comparison is None else [comparison.sentence, _other_classes(comparison, over_classes), comparison.limits],
        role=runs[0][0].evaluation.role,
        spread=says_seeds(Counter(spec.variant for spec, _ in runs).values()),
        bold_says=BOLD if comparison is not None and comparison.best_set else "",
        rows=_rows(summaries, comparison, older_code),
        older_code={variant: made_by_older_code(files) for variant, files in older_code.items()},
        figures={"Recall@K": FIGURE_FILE} | ({"Recall@1 over epochs": EPOCHS_FILE} if has_curves else {}),
        differences=f"{DIFFERENCES_FOLDER}/{DIFFERENCES_FILE}",
    )
    write_whole(folder / REPORT_FILE, text)
    return text


# ---------------------------------------------------------------- for DVC


def _write_metrics(summaries: Summaries, folder: Path) -> None:
    """Write one file per variant; remove files of variants that are no longer in the comparison."""
    for path in folder.glob("*.json"):
        if path.stem not in summaries:
            path.unlink()
    for variant, metrics in summaries.items():
        means = {name: round(metrics[name].mean, 6) for name in HEADLINES if name in metrics}
        write_whole(folder / f"{variant}.json", json.dumps(means, indent=2) + "\n")


def _write_scores(runs: Scored, summaries: Summaries, path: Path) -> None:
    """Write a header and a row per variant and metric: mean, half of the 95 % interval, each seed's value; missing values are empty."""
    seeds = sorted({spec.seed for spec, _ in runs})
    measured = {(spec.variant, spec.seed): metrics for spec, metrics in runs}
    rows = [["variant", "metric", "mean", "half_width", *(f"seed_{seed}" for seed in seeds)]]
    for variant, metrics in summaries.items():
        for name, summary in metrics.items():
            values = [summary.mean, summary.half_width, *(measured.get((variant, seed), {}).get(name) for seed in seeds)]
            rows.append([variant, name, *("" if value is None else f"{value:.6f}" for value in values)])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_whole(path, text.getvalue())


# ---------------------------------------------------------------- for readers


def _draw_figures(title: str, runs: Recorded, folder: Path) -> bool:
    """Draw Recall@K and, if runs measured it, Recall@1 over epochs; return whether they did."""
    from dml_core.figures.over_epochs import plot_over_epochs  # Matplotlib takes 0.4 s, and most commands find the report written
    from dml_core.figures.recalls import plot_recalls

    recalls: dict[str, dict[int, list[float]]] = {}
    curves: dict[str, dict[str, dict[int, list[float]]]] = {}
    for spec, record in runs:
        for name in table_columns(record.metrics):
            if (k := recall_k(name)) is not None:
                recalls.setdefault(spec.variant, {}).setdefault(k, []).append(record.metrics[name])
        for role, curve in record.recall_by_epoch.items():
            for epoch, value in curve.items():
                curves.setdefault(spec.variant, {}).setdefault(role, {}).setdefault(epoch, []).append(value)
    plot_recalls(recalls, folder / FIGURE_FILE, title)
    (folder / EPOCHS_FILE).unlink(missing_ok=True)
    if curves:
        plot_over_epochs(curves, folder / EPOCHS_FILE, f"{title}: Recall@1 over epochs")
    return bool(curves)


def _rows(summaries: Summaries, comparison: Comparison | None, older_code: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return a header and a row per variant; the confidence set of the best is bold, and a last column has differences."""
    columns = table_columns(next(iter(summaries.values())))
    compared = comparison if comparison is not None and comparison.best_set else None
    rows = [["variant", *columns, *([compared.heading] if compared else [])]]
    for variant, metrics in summaries.items():
        name, first, *others = variant, *(str(metrics[column]) for column in columns)
        if compared and variant in compared.best_set:
            name, first = f"**{name}**", f"**{first}**"
        name += " (other code)" if variant in older_code else ""
        rows.append([name, first, *others, *([compared.difference_text(variant)] if compared else [])])
    return rows


def _write_differences(title: str, runs: Scored, comparison: Comparison | None, over_classes: Mapping[str, str], folder: Path) -> None:
    """Write every pair of variants and, for at least three variants and three seeds, their ranks over the seeds."""
    folder.mkdir(exist_ok=True)
    (folder / RANKS_FILE).unlink(missing_ok=True)
    tables: dict[str, list[list[str]]] = {}
    ranking = None
    if comparison is not None:
        tables = _difference_tables(comparison, over_classes)
        ranking = rank_systems(comparison.metric, {comparison.dataset: _scores(runs, comparison.metric, 100)})
    if ranking is not None:
        from dml_core.figures.mean_ranks import plot_mean_ranks

        plot_mean_ranks(ranking, folder / RANKS_FILE)
    text = render("differences.md", title=title, comparison=comparison, **tables, ranking=ranking, ranks_file=RANKS_FILE)
    write_whole(folder / DIFFERENCES_FILE, text)


def _difference_tables(comparison: Comparison, over_classes: Mapping[str, str]) -> dict[str, list[list[str]]]:
    """Return the tables of differences, each with its header: all pairs, probabilities, and intervals for other classes."""
    pairs = [["row - column", *comparison.means]]
    for system, row in comparison.matrix:
        differences = ["" if pair is None else comparison.said(pair) for pair in row]
        is_bold = [pair is not None and pair.is_significant for pair in row]
        pairs.append([system, *(f"**{text}**" if bold else text for text, bold in zip(differences, is_bold, strict=True))])
    posteriors = [["system", "P(better)", "P(practically equal)", "P(worse)"]]
    of_queries = f"on these {comparison.num_classes or 'test'} classes, mean over queries"
    classes = [["system", of_queries, "over seeds and classes, mean over classes"]]
    for pair in comparison.against:
        if pair.posterior is not None:
            posteriors.append([pair.system, *(f"{share:.2f}" for share in pair.posterior)])
        if pair.system in over_classes:
            classes.append([pair.system, comparison.said(pair), over_classes[pair.system]])
    return {"pairs": pairs, "posteriors": posteriors, "over_classes": classes}


def _over_classes(runs: Recorded, comparison: Comparison) -> dict[str, str]:
    """Return system -> difference to the reference or the best mean, with a simultaneous interval over seeds and classes."""
    recalls = {(spec.variant, spec.seed): record.class_recalls for spec, record in runs}
    classes = sorted({label for of_run in recalls.values() for label in of_run})
    differences: dict[str, str] = {}
    if comparison.metric != "recall@1" or not classes:
        return differences
    for pair in comparison.against:
        if pair.level is None:
            continue
        values, references = (
            100 * np.array([[recalls[name, seed].get(label, math.nan) for label in classes] for seed in pair.seeds])
            for name in (pair.system, pair.other)
        )
        interval = difference_over_classes(values, references, pair.level)
        if interval is not None and math.isfinite(interval[1]):
            differences[pair.system] = f"{comparison.figure(interval[0])} ± {interval[1]:.{comparison.decimals}f}"
    return differences


def _other_classes(comparison: Comparison, over_classes: Mapping[str, str]) -> str | None:
    """Return a sentence on whether the lead holds for other classes, or None if nothing is known."""
    if not comparison.to_best:
        return None
    if comparison.num_classes is not None and comparison.num_classes < MIN_CLASSES:
        return f"No conclusion about other classes: {comparison.num_classes} test classes are too few."
    lead = comparison.best if comparison.reference != comparison.best else next(iter(over_classes), comparison.best)
    if lead not in over_classes:
        return None
    how = "mean over classes, each with equal weight; interval over seeds and classes"
    return f"For other classes of the same kind ({how}): {lead} - {comparison.reference} = {over_classes[lead]}."
