"""Judge the claims of a table by paired differences over seeds, corrected for the number of claims.

A claim *holds* if value and reference differ, by the paired t test at 0.05 with Holm's correction over all testable claims of the table, on
the claim's side; it is *refuted* if they differ on the other side; otherwise it is *not shown*. So if no value of a table differs from its
reference, some claim holds or is refuted in at most 5 of 100 cases. A claim that two values differ ("either" side) can only hold or be not
shown. Fewer than three seeds decide nothing. An exploratory claim was examined again with other data or settings: its error rate is
unknown.
"""

from typing import Literal

import numpy as np

from dml_core.evaluation.metric_info import metric_info
from dml_core.evaluation.statistics.comparing import LEVEL, tested_on
from dml_core.evaluation.statistics.confidence import mean_over_seeds
from dml_core.evaluation.statistics.paired import MIN_SEEDS, holm, paired_difference
from dml_core.training.epochs import Epoch
from tasks.runs.comparable import scores_by_seed
from tasks.runs.records import Record
from tasks.tables.file import Claim, TableFile
from tasks.tables.result import TableResult

ClaimJudgement = Literal["holds", "refuted", "not shown", "not decided"]
Side = Literal["above", "below", "either"]
TIME = "_minutes"  # suffix of metrics that are times


class JudgedClaim(Record):
    """A claim with its judgement; values in the unit of the metric's column, or the metric's own unit if no column shows it.

    Attributes:
        says, row, metric, side, evidence, history, exploratory: as in the file.
        dataset: dataset of the values.
        reference: row that the value is compared with; None for a number.
        reference_metric: metric of the reference.
        seeds: seeds that both sides have.
        values, references: one for each of these seeds.
        difference, half_width: mean of value - reference, and half of its 95 % interval, not corrected for other claims; None for no seed,
            and for fewer than three.
        p_value: of the paired t test; p_holm: corrected over the table's claims.
        why: reason why the claim is undecided.
    """

    says: str
    row: str
    metric: str
    side: Side
    evidence: str | None
    history: str | None
    exploratory: bool = False
    dataset: str
    reference: str | None
    reference_metric: str
    seeds: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    references: tuple[float, ...] = ()
    difference: float | None = None
    half_width: float | None = None
    p_value: float | None = None
    p_holm: float | None = None
    judgement: ClaimJudgement = "not decided"
    why: str | None = None

    @property
    def mean(self) -> float | None:
        """Mean of the values."""
        return mean_over_seeds(self.values)[0] if self.values else None

    @property
    def reference_mean(self) -> float | None:
        """Mean of the references."""
        return mean_over_seeds(self.references)[0] if self.references else None

    @property
    def ratio(self) -> float | None:
        """Ratio of the two means for a time, whose difference does not carry over to another machine; None for other metrics."""
        if not self.mean or not self.reference_mean or not self.metric.endswith(TIME):
            return None
        return self.mean / self.reference_mean


def judge_claims(table: TableFile, result: TableResult, epoch: Epoch = "last") -> tuple[JudgedClaim, ...]:
    """Judge every claim of a table by the existing runs, with their weights of one epoch."""
    result = result.model_copy(update={"runs": tuple(run for run in result.runs if run.epoch == epoch)})
    claims = [_measured(table, claim, result) for claim in table.claims]
    corrected = iter(holm([claim.p_value for claim in claims if claim.p_value is not None]))
    return tuple(claim if claim.p_value is None else _judged(claim, next(corrected)) for claim in claims)


def _judged(claim: JudgedClaim, p_holm: float) -> JudgedClaim:
    judgement: ClaimJudgement = "not shown"
    if p_holm < LEVEL and claim.difference is not None:
        judgement = "holds" if claim.side == "either" or (claim.difference > 0) == (claim.side == "above") else "refuted"
    return claim.model_copy(update={"p_holm": p_holm, "judgement": judgement})


def _measured(table: TableFile, claim: Claim, result: TableResult) -> JudgedClaim:
    """Return a claim with its values, not judged yet."""
    dataset = claim.dataset or table.flat_columns[0].dataset
    reference_metric = claim.reference_metric or claim.metric
    values = _by_seed(table, result, claim.row, claim.variant, dataset, claim.metric)
    if isinstance(claim.reference, str):
        references = _by_seed(table, result, claim.reference, claim.variant, dataset, reference_metric)
    else:
        references = dict.fromkeys(values, claim.reference * _factor(table, dataset, reference_metric))
    seeds = tuple(sorted(values.keys() & references.keys()))
    paired = tuple(values[seed] for seed in seeds), tuple(references[seed] for seed in seeds)
    found = None
    if len(seeds) >= MIN_SEEDS:
        is_share = metric_info(claim.metric).is_share_of_queries and metric_info(reference_metric).is_share_of_queries
        num_queries = _num_queries(result, claim.row, dataset) if is_share else None
        found = paired_difference(*paired, num_queries, _factor(table, dataset, claim.metric))
    return JudgedClaim(
        **claim.model_dump(include={"says", "row", "metric", "side", "evidence", "history", "exploratory"}),
        dataset=dataset,
        reference=claim.reference if isinstance(claim.reference, str) else None,
        reference_metric=reference_metric,
        seeds=seeds,
        values=paired[0],
        references=paired[1],
        difference=float(np.subtract(*paired).mean()) if seeds else None,
        half_width=None if found is None else found.half_width,
        p_value=None if found is None else found.p_value,
        why=_what_it_waits_for(claim, values, references, seeds) if found is None else None,
    )


def _by_seed(table: TableFile, result: TableResult, row: str, variant: str | None, dataset: str, metric: str) -> dict[int, float]:
    """Return a row's values of a metric by seed, in a variant or by default its first."""
    variant = variant or next(iter(table.rows[row].variants), None)
    factor = _factor(table, dataset, metric)
    runs = [run for run in result.runs if (run.row, run.variant, run.dataset) == (row, variant, dataset)]
    return scores_by_seed((row, run.seed, factor * run.scores[metric]) for run in runs if metric in run.scores).get(row, {})


def _factor(table: TableFile, dataset: str, metric: str) -> float:
    """Return the factor from a score to the unit of its column; 1 for a metric that no column shows."""
    return next((column.factor for column in table.flat_columns if (column.dataset, column.metric) == (dataset, metric)), 1.0)


def _what_it_waits_for(claim: Claim, values: dict[int, float], references: dict[int, float], seeds: tuple[int, ...]) -> str:
    missing = [repr(row) for row, found in ((claim.row, values), (claim.reference, references)) if isinstance(row, str) and not found]
    if missing:
        return f"no runs yet of {' and '.join(dict.fromkeys(missing))}"
    return f"{len(seeds)} of {MIN_SEEDS} seeds" if seeds else "the two rows have no seed in common"


def _num_queries(result: TableResult, row: str, dataset: str) -> int | None:
    return next((tested_on(run.scores)["num_queries"] for run in result.runs if (run.row, run.dataset) == (row, dataset)), None)
