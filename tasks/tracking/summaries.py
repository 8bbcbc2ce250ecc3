"""Means and intervals over the seeds of each published variant, for MLflow's pages and `dml compare`. Light to import."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dml_core.errors import TrackingError
from dml_core.evaluation.metric_info import table_columns
from dml_core.evaluation.statistics.comparing import Comparison, compare, tested_on
from dml_core.evaluation.statistics.confidence import Summary, summarise
from tasks.runs.best import VALIDATION
from tasks.runs.comparable import Selection, Today, scores_by_seed, select
from tasks.runs.records import ComparisonReport
from tasks.tracking.names import DETAIL, PublishedRun, metric_name, plain_name

if TYPE_CHECKING:
    from rich.table import Table


def today_of(report: ComparisonReport) -> Today:
    """Return the present of a comparison, from its report."""
    digests = {} if report.digest is None else {report.dataset: report.digest}
    return Today(digests, {(report.dataset, variant): settings for variant, settings in report.settings.items()}, report.is_one_protocol)


def comparable_runs(dataset: str, runs: Sequence[PublishedRun], today: Today) -> Selection[PublishedRun]:
    """Return the published runs that may be averaged by variant and paired by seed, and a line for each variant's omitted runs.

    Raises:
        TrackingError: MLflow has two current runs of one variant and seed.
    """
    found = select(runs, lambda run: run.facts(dataset), today)
    by_place: dict[tuple[str, int], PublishedRun] = {}
    for run in found.runs:
        other = by_place.setdefault((run.variant, run.seed), run)
        if other is not run:
            raise TrackingError(
                f"MLflow has two runs of {run.variant}, seed {run.seed} on {dataset} ({other.run_id} and {run.run_id}); delete one there"
            )
    return found


def validation_scores(runs: Sequence[PublishedRun]) -> dict[str, dict[int, float]]:
    """Return variant -> seed -> validation Recall@1 (`tasks.runs.best`), of the runs that have one."""
    name = f"{DETAIL}{metric_name(VALIDATION)}"
    return scores_by_seed((run.variant, run.seed, run.metrics[name]) for run in runs if name in run.metrics)


def summarise_published(runs: Sequence[PublishedRun]) -> dict[str, dict[str, Summary]]:
    """Return variant -> metric (by its MLflow name) -> summary over the variant's seeds; best Recall@1 first.

    The metrics are every Recall@K by ascending K, then MAP@R, R-precision and NMI; one that a seed lacks is summarised over the others.
    """
    columns = [metric_name(name) for name in table_columns(plain_name(name) for run in runs for name in run.metrics)]
    found: dict[str, dict[str, Summary]] = {run.variant: {} for run in runs}
    for name in columns:
        scores = scores_by_seed((run.variant, run.seed, run.metrics[name]) for run in runs if name in run.metrics)
        for variant, by_seed in scores.items():
            found[variant][name] = summarise(list(by_seed.values()))
    first = columns[0] if columns else ""
    return dict(sorted(found.items(), key=lambda item: -item[1][first].mean if first in item[1] else 1.0))


def compare_published(dataset: str, runs: Sequence[PublishedRun], reference: str | None = None) -> Comparison | None:
    """Compare the variants of a comparison by their first metric, in per cent, paired by seed; return None for one variant."""
    first = next(iter(table_columns(plain_name(name) for run in runs for name in run.metrics)), None)
    if first is None:
        return None
    name = metric_name(first)
    scores = scores_by_seed((run.variant, run.seed, 100 * run.metrics[name]) for run in runs if name in run.metrics)
    counts = {plain_name(name.removeprefix(DETAIL)): value for name, value in runs[0].metrics.items()}
    return compare(dataset, first, scores, reference, **tested_on(counts))


def comparison_table(title: str, runs: Sequence[PublishedRun], found: Comparison | None = None) -> "Table":
    """Return a comparison's published runs as a terminal table: a row per variant, best first, mean and interval over its seeds.

    Args:
        title: title of the table.
        runs: the comparison's runs.
        found: their comparison: the confidence set of the best is bold, and a last column has differences.
    """
    from rich.table import Column, Table

    summaries = summarise_published(runs)
    names = list(dict.fromkeys(name for metrics in summaries.values() for name in metrics))
    bold = found.best_set if found is not None else frozenset()
    heading = [found.heading] if found is not None and bold else []
    table = Table(
        Column("variant", min_width=max(map(len, summaries))), "seeds", *(plain_name(name) for name in names), *heading, title=title
    )
    for variant, metrics in summaries.items():
        num_seeds = sum(run.variant == variant for run in runs)
        beside = [found.beside(variant)] if found is not None and bold else []
        cells = (str(metrics[name]) if name in metrics else "-" for name in names)
        table.add_row(variant, str(num_seeds), *cells, *beside, style="bold" if variant in bold else None)
    return table
