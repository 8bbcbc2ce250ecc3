"""Whether a table shows what it is there to show: paired differences over seeds, judged by their 95 % interval.

A claim *holds* if the interval of (value - reference), Student's t over the seeds that both have, lies wholly on the claim's side of 0; it
is *refuted* if it lies wholly on the other; otherwise it is *not shown*. That two values differ ("either" side) can only hold or be not
shown. Fewer than two seeds decide nothing.
"""

from collections.abc import Sequence
from typing import Literal

from dml_core.evaluation.confidence import mean_over_seeds
from dml_core.evaluation.statistics import paired_difference
from tasks.runs.comparable import scores_by_seed
from tasks.runs.records import Record
from tasks.tables.file import Claim, TableFile
from tasks.tables.result import TableResult

ClaimJudgement = Literal["holds", "refuted", "not shown", "not decided"]
Side = Literal["above", "below", "either"]
TIME = "_minutes"  # how metrics that are times end


class JudgedClaim(Record):
    """A claim with what the runs say of it; figures in the unit of the metric's column, or its own where it has none.

    Attributes:
        says, row, metric, side, evidence, history: as the file has them.
        dataset: the one that was looked at.
        reference: the row that the value is compared with; None for a number.
        reference_metric: of that row.
        seeds: those that both sides have.
        values, references: one for each of these seeds.
        difference, half_width: mean of value - reference, and half of its 95 % interval; None for no seed, and for fewer than two.
        why: of a claim that is not decided, what it waits for.
    """

    says: str
    row: str
    metric: str
    side: Side
    evidence: str | None
    history: str | None
    dataset: str
    reference: str | None
    reference_metric: str
    seeds: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    references: tuple[float, ...] = ()
    difference: float | None = None
    half_width: float | None = None
    judgement: ClaimJudgement = "not decided"
    why: str | None = None

    @property
    def mean(self) -> float | None:
        """Of the values."""
        return mean_over_seeds(self.values)[0] if self.values else None

    @property
    def reference_mean(self) -> float | None:
        """Of the references."""
        return mean_over_seeds(self.references)[0] if self.references else None

    @property
    def ratio(self) -> float | None:
        """Of the two means, where both are times: of these no difference carries over to another machine."""
        if not self.mean or not self.reference_mean or not self.metric.endswith(TIME):
            return None
        return self.mean / self.reference_mean


def judge_pairs(values: Sequence[float], references: Sequence[float], side: Side) -> tuple[ClaimJudgement, float | None, float | None]:
    """(judgement, mean difference, half of its 95 % interval) of values and references paired by position."""
    if len(values) < 2:
        return "not decided", values[0] - references[0] if values else None, None
    found = paired_difference(values, references)
    if abs(found.mean) <= found.half_width:
        return "not shown", found.mean, found.half_width
    holds = side == "either" or (found.mean > 0) == (side == "above")
    return ("holds" if holds else "refuted"), found.mean, found.half_width


def judge_claims(table: TableFile, result: TableResult) -> tuple[JudgedClaim, ...]:
    """Every claim of a table, judged by the runs that are there."""
    return tuple(_judge(table, claim, result) for claim in table.claims)


def _judge(table: TableFile, claim: Claim, result: TableResult) -> JudgedClaim:
    dataset = claim.dataset or table.flat_columns[0].dataset
    reference_metric = claim.reference_metric or claim.metric
    values = _by_seed(table, result, claim.row, claim.variant, dataset, claim.metric)
    if isinstance(claim.reference, str):
        references = _by_seed(table, result, claim.reference, claim.variant, dataset, reference_metric)
    else:
        references = dict.fromkeys(values, claim.reference * _factor(table, dataset, reference_metric))
    seeds = tuple(sorted(values.keys() & references.keys()))
    paired = tuple(values[seed] for seed in seeds), tuple(references[seed] for seed in seeds)
    judgement, difference, half_width = judge_pairs(*paired, claim.side)
    return JudgedClaim(
        **claim.model_dump(include={"says", "row", "metric", "side", "evidence", "history"}),
        dataset=dataset,
        reference=claim.reference if isinstance(claim.reference, str) else None,
        reference_metric=reference_metric,
        seeds=seeds,
        values=paired[0],
        references=paired[1],
        difference=difference,
        half_width=half_width,
        judgement=judgement,
        why=_what_it_waits_for(claim, values, references, seeds) if judgement == "not decided" else None,
    )


def _by_seed(table: TableFile, result: TableResult, row: str, variant: str | None, dataset: str, metric: str) -> dict[int, float]:
    """A row's values of a metric by seed after the last epoch: in a variant, or its first."""
    variant = variant or next(iter(table.rows[row].variants), None)
    factor = _factor(table, dataset, metric)
    runs = [run for run in result.runs if (run.row, run.variant, run.dataset, run.epoch) == (row, variant, dataset, "last")]
    return scores_by_seed((row, run.seed, factor * run.scores[metric]) for run in runs if metric in run.scores).get(row, {})


def _factor(table: TableFile, dataset: str, metric: str) -> float:
    """From a score to the unit of its column; 1 for a metric that no column shows."""
    return next((column.factor for column in table.flat_columns if (column.dataset, column.metric) == (dataset, metric)), 1.0)


def _what_it_waits_for(claim: Claim, values: dict[int, float], references: dict[int, float], seeds: tuple[int, ...]) -> str:
    missing = [repr(row) for row, found in ((claim.row, values), (claim.reference, references)) if isinstance(row, str) and not found]
    if missing:
        return f"no runs yet of {' and '.join(dict.fromkeys(missing))}"
    return "one seed only" if seeds else "the two rows have no seed in common"
