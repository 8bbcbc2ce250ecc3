"""Judge a table's measurements: its published values, its claims, and which of its lines are better.

A published value is one run. It is *compatible* with the measured runs if it is inside the 95 % prediction interval of one more run,
mean ± t s sqrt(1 + 1/n), with n seeds, their standard deviation s and t with n - 1 degrees of freedom (Hahn and Meeker, Statistical
Intervals, 1991); otherwise the measured runs are *above* or *below* it. If the paper chose its epoch on the test classes, the judged runs
chose theirs the same way (`Protocol.prints`). Equality of the *mean* and the published value p within a tolerance is a
separate statement: the 90 % interval of the mean is inside p ± tolerance (two one-sided tests at 0.05, Schuirmann 1987). A share of few
queries takes few values, so both intervals have a minimum width (`judge`).

A claim *holds* if value and reference differ, by the paired t test at 0.05 with Holm's correction over all testable claims of the table, on
the claim's side; it is *refuted* if they differ on the other side; otherwise it is *not shown*. So if no value of a table differs from its
reference, some claim holds or is refuted in at most 5 of 100 cases. A claim that two values differ ("either" side) can only hold or be not
shown. An exploratory claim was examined again with other data or settings: its error rate is unknown.

Lines (a row in a variant) are compared and ranked by the first metric of each dataset for which higher is better
(`dml_core.evaluation.statistics.comparing`), at one epoch (`compared_epoch`). Fewer than three seeds decide nothing.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from scipy.special import ndtri, stdtrit

from dml_core.epochs import EPOCHS, Epoch
from dml_core.evaluation.metric_info import metric_info
from dml_core.evaluation.statistics.comparing import LEVEL, Comparison, Scores, compare, tested_on
from dml_core.evaluation.statistics.mean_ranks import Ranking, rank_systems
from dml_core.evaluation.statistics.paired import MIN_SEEDS, half_width_of, holm, paired_difference
from tasks.runs.comparable import scores_by_seed
from tasks.tables.file import Claim, Column, TableFile
from tasks.tables.result import MeasuredRun, TableResult
from tasks.tables.shown import ClaimJudgement, JudgedClaim, Judgement, ShownColumn, ShownLine
from tasks.wording import counted

POINTS = {"per cent": 1.0, "share": 0.01}  # one percentage point in the column's unit

# ---------------------------------------------------------------- published values


@dataclass(frozen=True)
class Verdict:
    """Verdict of the runs on a published value, with the fields of a `ShownCell`.

    Attributes:
        verdict: compatible, above, below or undecided.
        says: the verdict in words.
        low, high: ends of the prediction interval of one run; None for fewer than MIN_SEEDS seeds.
        is_equal: whether the mean equals the published value within the tolerance.
    """

    verdict: Judgement
    says: str
    low: float | None = None
    high: float | None = None
    is_equal: bool = False


def judge(
    values: Sequence[float],
    published: float,
    tolerance: float,
    num_queries: int | None = None,
    whole: float = 1.0,
    rounding: float = 0.0,
) -> Verdict:
    """Judge one published value; all numbers are in one unit.

    If the values are shares of queries, s is at least one query, and half of the interval of the mean is at least that of the binomial
    variance of the share at the mean, which is known and therefore takes the normal quantile.

    Args:
        values: one per seed, at least one.
        published: the published value p.
        tolerance: tolerance of the equivalence test, above 0.
        num_queries: number of queries of which the values are the share found; None for other scores.
        whole: score if all queries are found: 1, or 100 for per cent.
        rounding: half of the published value's last decimal place, which widens the prediction interval.
    """
    num_seeds, mean = len(values), float(np.mean(values))
    if num_seeds < MIN_SEEDS:
        return Verdict("undecided", f"undecided ({_too_few(num_seeds)})")
    deviation = float(np.std(values, ddof=1))
    half_90 = half_width_of(deviation, num_seeds, 0.1)
    if num_queries is not None:
        half_90 = max(half_90, _least_half_90(mean, num_queries, whole) / num_seeds**0.5)
        deviation = max(deviation, whole / num_queries)
    error = deviation * (1 + 1 / num_seeds) ** 0.5
    half_width = float(stdtrit(num_seeds - 1, 0.975)) * error + rounding
    low, high = mean - half_width, mean + half_width
    verdict: Judgement = "above" if published < low else "below" if published > high else "compatible"
    is_equal = half_90 > 0 and abs(mean - published) + half_90 <= tolerance
    return Verdict(verdict, f"{verdict}, mean equal" if is_equal else verdict, low, high, is_equal)


def fewest_for_equality(published: float, tolerance: float, num_queries: int, whole: float) -> int:
    """Return the fewest seeds whose mean `judge` can call equal to a published share of queries: with fewer the interval is too wide."""
    return max(MIN_SEEDS, ceil((_least_half_90(published, num_queries, whole) / tolerance) ** 2))


def _least_half_90(mean: float, num_queries: int, whole: float) -> float:
    """Return the least half-width of one seed's 90 % interval, by the binomial variance of the share."""
    share = min(max(mean / whole, 1 / num_queries), 1 - 1 / num_queries)
    return float(ndtri(0.95)) * whole * (share * (1 - share) / num_queries) ** 0.5


def _too_few(num_seeds: int) -> str:
    return f"{counted(num_seeds, 'seed')}; at least {MIN_SEEDS} needed"


# ---------------------------------------------------------------- claims


def judge_claims(table: TableFile, result: TableResult, epoch: Epoch = "last") -> tuple[JudgedClaim, ...]:
    """Judge every claim of a table by the existing runs, with their weights of one epoch."""
    runs = [run for run in result.runs if run.epoch == epoch]
    claims = [_measured_claim(table, claim, runs) for claim in table.claims]
    corrected = iter(holm([claim.p_value for claim in claims if claim.p_value is not None]))
    return tuple(claim if claim.p_value is None else _judged_claim(claim, next(corrected)) for claim in claims)


def _judged_claim(claim: JudgedClaim, p_holm: float) -> JudgedClaim:
    judgement: ClaimJudgement = "not shown"
    if p_holm < LEVEL and claim.difference is not None:
        judgement = "holds" if claim.side == "either" or (claim.difference > 0) == (claim.side == "above") else "refuted"
    return claim.model_copy(update={"p_holm": p_holm, "judgement": judgement})


def _measured_claim(table: TableFile, claim: Claim, runs: Sequence[MeasuredRun]) -> JudgedClaim:
    """Return a claim with its values, not judged yet."""
    dataset = claim.dataset or table.flat_columns[0].dataset
    reference_metric = claim.reference_metric or claim.metric
    factors = {column.metric: column.factor for column in table.flat_columns if column.dataset == dataset}
    factor = factors.get(claim.metric, factors.get(reference_metric, 1.0))
    reference_factor = factors.get(reference_metric, factor)

    def scores(row: str, metric: str, to_unit: float) -> dict[int, float]:
        """Return seed -> a row's score in the column's unit, in the claim's variant (by default the row's first)."""
        variant = claim.variant or next(iter(table.rows[row].variants), None)
        of_row = [run for run in runs if (run.row, run.variant, run.dataset) == (row, variant, dataset) and metric in run.scores]
        return scores_by_seed((row, run.seed, to_unit * run.scores[metric]) for run in of_row).get(row, {})

    values = scores(claim.row, claim.metric, factor)
    if isinstance(claim.reference, str):
        references = scores(claim.reference, reference_metric, reference_factor)
    else:
        references = dict.fromkeys(values, claim.reference * reference_factor)
    seeds = tuple(sorted(values.keys() & references.keys()))
    paired = tuple(values[seed] for seed in seeds), tuple(references[seed] for seed in seeds)
    test = None
    if len(seeds) >= MIN_SEEDS:
        num_queries = None
        if metric_info(claim.metric).is_share_of_queries and metric_info(reference_metric).is_share_of_queries:
            num_queries = next(tested_on(run.scores)["num_queries"] for run in runs if (run.row, run.dataset) == (claim.row, dataset))
        test = paired_difference(*paired, num_queries, factor)
    return JudgedClaim(
        **claim.model_dump(include={"says", "row", "metric", "side", "evidence", "history", "exploratory"}),
        dataset=dataset,
        reference=claim.reference if isinstance(claim.reference, str) else None,
        reference_metric=reference_metric,
        seeds=seeds,
        values=paired[0],
        references=paired[1],
        difference=float(np.subtract(*paired).mean()) if seeds else None,
        half_width=None if test is None else test.half_width,
        p_value=None if test is None else test.p_value,
        why=None if test is not None else _why_undecided(claim, {run.row for run in runs if run.dataset == dataset}, values, references),
    )


def _why_undecided(claim: Claim, measured: Collection[str], values: dict[int, float], references: dict[int, float]) -> str:
    """Say what a claim needs to be decided; `measured` are the rows that have runs."""
    sides = (claim.row, claim.metric, values), (claim.reference, claim.reference_metric or claim.metric, references)
    missing = [(row, metric) for row, metric, scores in sides if isinstance(row, str) and not scores]
    if no_runs := [repr(row) for row, _ in missing if row not in measured]:
        return f"no runs of {' and '.join(dict.fromkeys(no_runs))}"
    if missing:
        return f"the runs of '{missing[0][0]}' in this variant have no {missing[0][1]}"
    num_shared = len(values.keys() & references.keys())
    return _too_few(num_shared) if num_shared else "the two rows share no seed"


# ---------------------------------------------------------------- lines


def compared_epoch(printed: Epoch, epochs: Collection[Epoch]) -> Epoch:
    """Return the one epoch whose scores are compared: the printed one, or the first of `EPOCHS` if nothing has that.

    Other epochs of a run are the same training, and one chosen on the test classes would win over an honest one.
    """
    return printed if printed in epochs else next((epoch for epoch in EPOCHS if epoch in epochs), printed)


def compared_columns(columns: Sequence[Column | ShownColumn]) -> dict[str, int]:
    """Return, for each dataset, the index of its first column whose metric is better when higher."""
    indices: dict[str, int] = {}
    for index, column in enumerate(columns):
        if metric_info(column.metric).higher_is_better:
            indices.setdefault(column.dataset, index)
    return indices


def compare_lines(columns: Sequence[ShownColumn], lines: Sequence[ShownLine], reference: str | None) -> tuple[Comparison, ...]:
    """Compare the lines on each dataset on which two of them share enough seeds; the table's file may name the `reference`."""
    comparisons = []
    for dataset, index in compared_columns(columns).items():
        column = columns[index]
        cells = [cell for line in lines if (cell := line.cells[index]) is not None]
        comparison = compare(
            dataset,
            column.metric,
            _scores(lines, index),
            reference,
            POINTS.get(column.unit),
            column.decimals,
            min((cell.num_queries for cell in cells if cell.num_queries is not None), default=None),
            min((cell.num_classes for cell in cells if cell.num_classes is not None), default=None),
        )
        if comparison is not None and comparison.to_best:
            comparisons.append(comparison)
    return tuple(comparisons)


def rank_lines(columns: Sequence[ShownColumn], lines: Sequence[ShownLine], tuned_on: Callable[[str], str] = str) -> Ranking | None:
    """Rank the lines over the datasets that share a metric, or over the seeds of the only measured dataset; otherwise return None.

    Of a dataset and the one on which its tuned settings were searched (`tuned_on`), often a part of it, the latter is left out: the two are
    not independent.
    """
    by_dataset = {dataset: index for dataset, index in compared_columns(columns).items() if _scores(lines, index)}
    searched = {tuned_on(dataset) for dataset in by_dataset if tuned_on(dataset) != dataset}
    measured = {index: _scores(lines, index) for dataset, index in by_dataset.items() if dataset not in searched}
    metrics = [columns[index].metric for index in measured]
    metric = next((metric for metric in metrics if len(measured) == 1 or metrics.count(metric) > 1), None)
    if metric is None:
        return None
    return rank_systems(metric, {columns[index].dataset: scores for index, scores in measured.items() if columns[index].metric == metric})


def _scores(lines: Sequence[ShownLine], column: int) -> Scores:
    return {line.system: cell.values for line in lines if (cell := line.cells[column]) is not None}
