"""Content of a table's pages, Markdown, terminal and JSON: published values, measured values and the conclusions from them.

The JSON of a table is the record `ShownTable`, described in docs/reference/tables.md; `tasks.tables.view` computes it.
"""

from typing import Literal, get_args

import numpy as np

from dml_core.epochs import Epoch
from dml_core.evaluation.metric_info import metric_info
from dml_core.evaluation.statistics.comparing import Comparison
from dml_core.evaluation.statistics.mean_ranks import Ranking
from tasks.runs.protocols import COMMON
from tasks.runs.records import Record
from tasks.runs.tuned import TUNED
from tasks.tables.file import Value
from tasks.wording import counted, significant

FORMAT = 2
EPOCH_NOTES = {
    "last": "",
    "best_validation": "best epoch on held-out training classes",
    "oracle": "oracle epoch (chosen on the test classes)",
}
TIME = "_minutes"  # suffix of metrics that are times
Judgement = Literal["compatible", "above", "below", "undecided"]
VERDICTS = get_args(Judgement)
ClaimJudgement = Literal["holds", "refuted", "not shown", "not decided"]
Status = Literal["quoted", "measured", "partly measured", "stand-in only", "failed", "not run"]


class ShownColumn(Record):
    """One column: dataset, metric and unit (per cent, share, minutes, distance, count, degrees).

    Attributes:
        printed_decimals: most decimals of a published, released or independent value in this column; decimals: those of measured values.
        stands_in_for: the paper's dataset that this one replaces; None for the paper's own.
    """

    dataset: str
    metric: str
    unit: str
    printed_decimals: int
    decimals: int
    stands_in_for: str | None = None

    def printed(self, value: Value) -> str:
        """Return a published value as text."""
        return "-" if value is None else f"{value:.{self.printed_decimals}f}"

    def measured(self, value: float) -> str:
        """Return a measured value as text."""
        return f"{round(value, self.decimals) + 0.0:.{self.decimals}f}"  # no -0.0


class ShownCell(Record):
    """Measurements of one cell, in the column's unit.

    Attributes:
        values: seed -> value.
        mean, half_width: mean, and half of its 95 % interval over seeds; the latter is None for fewer than three seeds.
        tolerance: tolerance of the equivalence test; None if there is none.
        verdict: whether the published value may be one of the measured runs; None if the paper has no value.
        low, high: ends of the prediction interval of one run; None for fewer than three seeds.
        is_equal: whether the mean equals the published value within the tolerance.
        says: the verdict in words.
        num_queries, num_classes: numbers behind the values, if the scores have them.
        same_as: line with the same settings on the dataset, which is compared instead: its variant, or its system if of another row.
    """

    values: dict[int, float]
    mean: float
    half_width: float | None = None
    tolerance: float | None = None
    verdict: Judgement | None = None
    low: float | None = None
    high: float | None = None
    is_equal: bool = False
    says: str = ""
    num_queries: int | None = None
    num_classes: int | None = None
    same_as: str | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval of the mean; the mean twice for fewer than three seeds."""
        return self.mean - (self.half_width or 0.0), self.mean + (self.half_width or 0.0)


class ShownTolerance(Record):
    """Tolerance within which a mean equals a published value, with its reason; `of` names the cells, `says` size and needed seeds."""

    of: str
    value: float
    says: str
    reason: str


class ShownRun(Record):
    """One run behind a line: where it is and how it is identified.

    Attributes:
        figures: key of a folder in the store.
        commit: git commit of its flow, if known.
        is_imported: whether another project measured it.
        has_other_code: whether other code than that of the page made it.
    """

    dataset: str
    project_dataset: str
    seed: int
    identity: str
    figures: str
    seconds: float | None
    commit: str | None = None
    is_imported: bool = False
    has_other_code: bool = False


class ShownLine(Record):
    """Measurements of a row in one variant at one epoch.

    Attributes:
        variant: variant of the protocol.
        epoch: epoch whose weights were scored.
        seeds: all seeds that ran, on any dataset.
        cells: one per column; None where nothing was measured.
        runs: by dataset and seed.
        older_code: files that differ from those that made some of its runs, which were kept nevertheless.
        system: name in comparisons: the row, with the variant if the row has several lines or it is not the row's first, and the epoch if
            it is not the last.
    """

    variant: str
    epoch: Epoch
    seeds: tuple[int, ...]
    cells: tuple[ShownCell | None, ...]
    runs: tuple[ShownRun, ...]
    older_code: tuple[str, ...]
    system: str = ""

    @property
    def imported(self) -> str:
        """The number of imported runs in words; empty if there are none."""
        number = sum(run.is_imported for run in self.runs)
        return f"{counted(number, 'run')} imported" if number else ""

    @property
    def other_code(self) -> str:
        """Note that other code than the page's made the runs, or some of them; empty if it made none."""
        number = sum(run.has_other_code for run in self.runs)
        return f"{'' if number == len(self.runs) else f'{number} of {len(self.runs)} runs '}made by other code" if number else ""

    @property
    def counted_seeds(self) -> str:
        """The number of seeds in words; a range if columns have different numbers."""
        numbers = {len(cell.values) for cell in self.cells if cell is not None} or {len(self.seeds)}
        least, most = min(numbers), max(numbers)
        return f"{least} to {most} seeds" if least < most else counted(most, "seed")

    @property
    def way(self) -> str:
        """The variant; of the common track, that nothing else of its row's label applies, such as a number of dimensions."""
        return "common track (only the row's loss), not judged" if self.variant == COMMON else self.variant

    @property
    def label(self) -> str:
        """The line in words: variant, epoch, numbers of seeds, of imported runs and of those of other code, and what it repeats."""
        parts = [self.way, EPOCH_NOTES[self.epoch], self.counted_seeds, self.imported, self.other_code, self.repeated]
        return ", ".join(filter(None, parts))

    @property
    def repeated(self) -> str:
        """Note that the line has the settings of another one, on all datasets or on some, and is not compared there; else empty."""
        variants = [cell.same_as for cell in self.cells if cell is not None]
        same = next((variant for variant in variants if variant is not None), None)
        return "" if same is None else f"settings of {same}{' on some datasets' if None in variants else ''}: not compared"


class ShownRow(Record):
    """One row of the paper's table.

    Attributes:
        name, label, kind, source, note, published, released, independent: as in the table's file.
        independent_source: source of the independent values; "none found" for a row to be run that has none.
        status: whether the row was measured on all of the paper's own datasets that have it.
        lines: its measurements, default variant first.
        waits: dataset -> what must be present or done before the row is measured on it; only the former if it failed.
        failures: "variant, dataset, seed" -> reason, of the last attempt.
    """

    name: str
    label: str
    kind: Literal["own", "rerun", "quoted"]
    source: str | None
    note: str | None
    published: tuple[Value, ...]
    released: tuple[Value, ...] | None
    independent: tuple[Value, ...] | None
    independent_source: str | None = None
    status: Status
    lines: tuple[ShownLine, ...] = ()
    waits: dict[str, str] = {}
    failures: dict[str, str] = {}

    @property
    def means(self) -> list[float | None]:
        """Mean of each column, from the first line in which it was measured."""
        columns = zip(*(line.cells for line in self.lines), strict=True) if self.lines else [()] * len(self.published)
        return [next((cell.mean for cell in cells if cell is not None), None) for cells in columns]

    @property
    def waiting(self) -> dict[str, list[str]]:
        """Reason for waiting -> datasets."""
        return {why: [dataset for dataset, other in self.waits.items() if other == why] for why in self.waits.values()}


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
        why: reason why the claim is not decided.
    """

    says: str
    row: str
    metric: str
    side: Literal["above", "below", "either"]
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
        return float(np.mean(self.values)) if self.values else None

    @property
    def reference_mean(self) -> float | None:
        """Mean of the references."""
        return float(np.mean(self.references)) if self.references else None

    @property
    def ratio(self) -> float | None:
        """Ratio of the two means for a time, whose difference does not carry over to another machine; None for other metrics."""
        if not self.mean or not self.reference_mean or not self.metric.endswith(TIME):
            return None
        return self.mean / self.reference_mean

    @property
    def numbers(self) -> str:
        """The compared means, their difference and the test in words; the reason if there is nothing to compare."""
        if self.mean is None or self.reference_mean is None or self.difference is None:
            return str(self.why)
        other_metric = f" ({metric_info(self.reference_metric).title})" if self.reference_metric != self.metric else ""
        spread = f" ± {significant(self.half_width, 3)}" if self.half_width is not None else ""
        both = f"{significant(self.mean, 4)} vs {significant(self.reference_mean, 4)}{other_metric}"
        parts = [
            f"{metric_info(self.metric).title} on {self.dataset}: {both}",
            f"difference {significant(self.difference, 3, '+')}{spread}",
        ]
        parts += [f"ratio {significant(self.ratio, 3)}"] if self.ratio is not None else []
        parts += [f"{len(self.seeds)} seeds", f"p = {self.p_holm:.2g} (Holm)"] if self.p_holm is not None else [str(self.why)]
        return ", ".join(parts)


class Counted(Record):
    """Counts for one kind of data: the paper's own datasets, or stand-ins.

    Attributes:
        rows: number of rows measured there, at least in part.
        verdicts: verdict -> number of cells, at the judged epoch; of a row's lines with the same settings the first.
        claims: judgement -> number of claims, without those not decided.
    """

    rows: int = 0
    verdicts: dict[str, int] = {}
    claims: dict[str, int] = {}


class ShownTable(Record):
    """A table or figure of a paper, with everything that was measured of it.

    Attributes:
        format: format of this record; it changes when readers have to change.
        name: `<paper>/<file>`.
        title, page, states, note: as in the file.
        made: git commit of the last run.
        tolerances: tolerances of verdicts; a later one overrides an earlier one.
        unresolved: neighbouring rows whose published values are within the tolerance of each other, a line for each pair.
        independent: findings about re-evaluations by others, for rows without an independent value.
        judged_epoch: epoch whose lines have verdicts and claims: the one that the paper prints.
        own_data, stand_in: counts on the paper's own datasets, and on stand-ins.
        gone: rows that have runs and are no longer in the file.
        comparisons: measured lines compared by the first metric of each dataset that has a best, if two lines share enough seeds.
        ranking: ranking of the lines over the datasets that share a metric, or over the seeds of the only dataset.
        left_out: runs omitted because their data or settings differ from those of the runs shown, and shown runs with former settings,
            a line for each system and reason.
    """

    format: int = FORMAT
    name: str
    title: str
    page: int | None
    states: str
    note: str | None
    made: str | None
    columns: tuple[ShownColumn, ...]
    rows: tuple[ShownRow, ...]
    tolerances: tuple[ShownTolerance, ...]
    unresolved: tuple[str, ...] = ()
    claims: tuple[JudgedClaim, ...]
    independent: str | None = None
    judged_epoch: Epoch = "last"
    own_data: Counted = Counted()
    stand_in: Counted = Counted()
    gone: tuple[str, ...]
    comparisons: tuple[Comparison, ...] = ()
    ranking: Ranking | None = None
    left_out: tuple[str, ...] = ()

    @property
    def commits(self) -> list[str]:
        """Commits of the runs, as far as recorded; imported runs may be of others."""
        runs = (run for row in self.rows for line in row.lines for run in line.runs)
        return sorted({run.commit for run in runs if run.commit is not None})

    @property
    def conclusions(self) -> list[str]:
        """Sentences of the comparisons and of a ranking over datasets; a table of several datasets names them. None from too few seeds."""
        if not self.comparisons:
            return []
        has_several = len({column.dataset for column in self.columns}) > 1
        sentences = [(f"{comparison.dataset}: " if has_several else "") + comparison.sentence for comparison in self.comparisons]
        return [*sentences, *([self.ranking.sentence] if self.ranking is not None and self.ranking.over == "datasets" else [])]

    @property
    def order(self) -> list[int]:
        """Indices of the columns that are shown: those with a measured value first, then those with others; all if none has a value."""
        measured = {place for row in self.rows for line in row.lines for place, cell in enumerate(line.cells) if cell is not None}
        others = (values for row in self.rows for values in (row.published, row.released, row.independent) if values is not None)
        other = {place for values in others for place, value in enumerate(values) if value is not None} - measured
        return [*sorted(measured), *sorted(other)] or list(range(len(self.columns)))

    def is_bold(self, line: ShownLine, column: int) -> bool:
        """Return whether the line's cell is in the confidence set of the best."""
        best = {(comparison.dataset, comparison.metric): comparison.best_set for comparison in self.comparisons}
        return line.system in best.get((self.columns[column].dataset, self.columns[column].metric), ())

    @property
    def is_figure(self) -> bool:
        """True for a figure: its page shows the pictures of its measurements first."""
        return self.name.rpartition("/")[2].startswith("figure")

    @property
    def num_to_run(self) -> int:
        """Number of rows that are not quoted."""
        return sum(row.kind != "quoted" for row in self.rows)

    @property
    def in_part(self) -> str:
        """Number of the measured rows that lack a dataset, in words that follow their number; empty for none."""
        num_partly = sum(row.status == "partly measured" for row in self.rows)
        return f", {num_partly} of them in part" if num_partly else ""

    @property
    def stand_ins(self) -> dict[str, str]:
        """Stand-in dataset -> the paper's dataset that it replaces."""
        return {column.dataset: column.stands_in_for for column in self.columns if column.stands_in_for is not None}

    @property
    def judged(self) -> str:
        """Sentences that name the epoch of verdicts and claims, unless it is the last, and tuned lines of a paper's table."""
        note, has_tuned = EPOCH_NOTES[self.judged_epoch], any(line.variant == TUNED for row in self.rows for line in row.lines)
        of_epoch = f"Verdicts and claims use the {note}, as the paper does; other lines are not judged." if note else ""
        of_tuned = "Tuned lines are not judged: the paper has other settings." if has_tuned and self.page is not None else ""
        return " ".join(filter(None, [of_epoch, of_tuned]))
