"""A table as it is shown: published values, measured values and verdicts, computed once for pages, Markdown and JSON.

The JSON of a table is this record, described in docs/tables.md. It is computed from the table's file and result.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import floor, log10
from typing import Literal

from dml_core.evaluation.statistics.comparing import Comparison, is_share_of_queries, tested_on
from dml_core.evaluation.statistics.confidence import mean_over_seeds
from dml_core.evaluation.statistics.mean_ranks import Ranking
from dml_core.training.epochs import EPOCHS, Epoch
from tasks.runs.comparable import UNKNOWN, Today, scores_by_seed, select
from tasks.runs.protocols import COMMON
from tasks.runs.records import Record
from tasks.tables.claims import JudgedClaim, judge_claims
from tasks.tables.comparing import compare_lines, rank_lines
from tasks.tables.counts import Counted, counted
from tasks.tables.file import Row, TableFile, Value
from tasks.tables.result import MeasuredRun, TableResult
from tasks.tables.runs import belongs, datasets_of, independent_figures, printed_epoch
from tasks.tables.tolerances import Tolerance, metric_family
from tasks.tables.verdicts import Judgement, judge

FORMAT = 2
EPOCH_NOTES = {
    "last": "",
    "best_validation": "best epoch on held-out training classes",
    "oracle": "oracle epoch (chosen on the test classes)",
}
DECIMALS = {"share": 3, "distance": 3}  # least number for a measured value; 1 for other units
NONE_FOUND = "none found"
NOTHING = 1e-5  # smaller values are rounding errors, shown as 0
Waiting = Mapping[tuple[str, str], str]
Status = Literal["quoted", "measured", "partly measured", "stand-in only", "not run"]


class ShownColumn(Record):
    """One column: dataset, metric and unit (per cent, share, minutes, distance, count, degrees).

    Attributes:
        printed_decimals: most decimals of a published value in this column; decimals: those of measured values.
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
        return f"{value:.{self.decimals}f}"


class ShownCell(Record):
    """Measurements of one cell, in the column's unit.

    Attributes:
        values: seed -> value.
        mean, half_width: mean, and half of its 95 % interval over seeds; the latter is None for one seed.
        tolerance: tolerance of the equivalence test; None if there is none.
        verdict: whether the published value may be one of the measured runs; None if the paper has no value.
        low, high: ends of the prediction interval of one run; None for fewer than three seeds.
        is_equal: whether the mean equals the published value within the tolerance.
        says: the verdict in words.
        num_queries, num_classes: numbers behind the values, if the scores have them.
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


class ShownTolerance(Record):
    """Tolerance within which a mean equals a published value, with its reason; `of` names the cells, `says` the size in words."""

    of: str
    value: float
    says: str
    reason: str


class ShownRun(Record):
    """One run behind a line: where it is and how it is identified. `figures` is the key of a folder in the store."""

    dataset: str
    project_dataset: str
    seed: int
    identity: str
    figures: str
    seconds: float | None


class ShownLine(Record):
    """Measurements of a row in one variant at one epoch.

    Attributes:
        variant: variant of the protocol.
        epoch: epoch whose weights were scored.
        seeds: all seeds that ran, on any dataset.
        cells: one per column; None where nothing was measured.
        runs: by dataset and seed.
        older_code: files that differ from those that made some of its runs, which were kept nevertheless.
        system: name in comparisons: the row, with the variant if the row has several lines, and the epoch if it is not the last.
    """

    variant: str
    epoch: Epoch
    seeds: tuple[int, ...]
    cells: tuple[ShownCell | None, ...]
    runs: tuple[ShownRun, ...]
    older_code: tuple[str, ...]
    system: str = ""

    @property
    def label(self) -> str:
        """The line in words: variant, epoch, number of seeds, and whether older code made it."""
        epoch = [EPOCH_NOTES[self.epoch]] if EPOCH_NOTES[self.epoch] else []
        older = ["made by older code"] if self.older_code else []
        variant = "common track, not judged" if self.variant == COMMON else self.variant
        return ", ".join([variant, *epoch, f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}", *older])


class ShownRow(Record):
    """One row of the paper's table.

    Attributes:
        name, label, kind, source, note, published, released, independent: as in the table's file.
        independent_source: source of the independent values; "none found" for a row to be run that has none.
        status: whether the row was measured on all of the paper's own datasets that have it.
        lines: its measurements, default variant first.
        waits: dataset -> what must be present or done before the row is measured on it.
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
    def waiting(self) -> dict[str, list[str]]:
        """Reason for waiting -> datasets."""
        return {why: [dataset for dataset, other in self.waits.items() if other == why] for why in self.waits.values()}


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
        left_out: runs omitted because their data or settings differ from those of the runs shown, a line each.
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
    def told(self) -> list[str]:
        """Statements of the comparisons and of a ranking over datasets, a line each; if there are several datasets, they are named."""
        named = len({column.dataset for column in self.columns}) > 1
        said = [f"{f'{found.dataset}: ' if named else ''}{found.sentence}" for found in self.comparisons]
        return [*said, *([self.ranking.sentence] if self.ranking is not None and self.ranking.over == "datasets" else [])]

    def is_bold(self, line: ShownLine, column: int) -> bool:
        """Return whether the line's cell is in the confidence set of the best."""
        place = self.columns[column].dataset, self.columns[column].metric
        return any((found.dataset, found.metric) == place and line.system in found.best_set for found in self.comparisons)

    @property
    def num_to_run(self) -> int:
        """Number of rows that are not quoted."""
        return sum(row.kind != "quoted" for row in self.rows)

    @property
    def stand_ins(self) -> dict[str, str]:
        """Stand-in dataset -> the paper's dataset that it replaces."""
        return {column.dataset: column.stands_in_for for column in self.columns if column.stands_in_for is not None}

    @property
    def judged(self) -> str:
        """Sentence that names the epoch of verdicts and claims; empty if it is the last."""
        note = EPOCH_NOTES[self.judged_epoch]
        return f"Verdicts and claims are of the {note}, which the paper prints; other lines are not judged." if note else ""


def shown_table(name: str, table: TableFile, result: TableResult, waiting: Waiting | None = None, today: Today = UNKNOWN) -> ShownTable:
    """Return a table with its measurements: every mean is over runs that differ only in the seed, on the present data.

    Args:
        name: `<paper>/<file>`.
        table: its file.
        result: its measured runs.
        waiting: (row, dataset) -> what it waits for, if more is known than that it was not run.
        today: present datasets and settings (`tasks.tables.present`); runs with others are omitted and named.
    """
    result, left_out = comparable(result, today)
    epoch = printed_epoch(name)
    rows = _with_systems([_row(name, table, row, result, waiting or {}) for row in table.rows])
    lines = [line for row in rows for line in row.lines]
    columns = _columns(table, rows)
    claims = judge_claims(table, result, epoch)
    own_data, stand_in = _counts(table, columns, rows, claims)
    return ShownTable(
        name=name,
        **table.model_dump(include={"title", "page", "states"}),
        note=_note(table),
        made=result.made,
        columns=columns,
        rows=rows,
        tolerances=tuple(
            ShownTolerance(of=of, value=found.value, says=found.says, reason=found.reason) for of, found in _tolerances(table)
        ),
        unresolved=tuple(_unresolved(table)),
        claims=claims,
        independent=independent_figures(name),
        judged_epoch=epoch,
        own_data=own_data,
        stand_in=stand_in,
        gone=tuple(sorted({run.row for run in result.runs} - table.rows.keys())),
        comparisons=compare_lines(columns, lines, _reference(table, rows)),
        ranking=rank_lines(columns, lines),
        left_out=left_out,
    )


def _counts(
    table: TableFile, columns: Sequence[ShownColumn], rows: Sequence[ShownRow], claims: Sequence[JudgedClaim]
) -> tuple[Counted, Counted]:
    """Return the counts on the paper's own datasets, and on stand-ins."""
    measured = [{run.dataset for line in row.lines for run in line.runs} for row in rows]
    cells = [(column, cell) for row in rows for line in row.lines for column, cell in zip(columns, line.cells, strict=True)]
    verdicts = [(column.dataset, cell.verdict) for column, cell in cells if cell is not None and cell.verdict is not None]
    judged = [(claim.dataset, claim.judgement) for claim in claims]
    is_own = {dataset: dataset not in table.stand_ins for dataset in datasets_of(table)}
    return counted(measured, verdicts, judged, is_own), counted(measured, verdicts, judged, {name: not own for name, own in is_own.items()})


def comparable(result: TableResult, today: Today = UNKNOWN) -> tuple[TableResult, tuple[str, ...]]:
    """Return a table's result with only the runs that may be averaged and compared, and a line for each line's omitted runs."""
    found = select(result.runs, lambda run: run.facts, today)
    return result.model_copy(update={"runs": found.runs}), found.left_out


def _with_systems(rows: Sequence[ShownRow]) -> tuple[ShownRow, ...]:
    """Return the rows with a unique system name for each line."""
    labels = Counter(row.label for row in rows)
    found = []
    for row in rows:
        name = row.label if labels[row.label] == 1 else f"{row.label} ({row.name})"
        lines = tuple(line.model_copy(update={"system": _system(name, line, len(row.lines) > 1)}) for line in row.lines)
        found.append(row.model_copy(update={"lines": lines}))
    return tuple(found)


def _system(row: str, line: ShownLine, is_one_of_several: bool) -> str:
    variant, epoch = [line.variant] if is_one_of_several else [], EPOCH_NOTES[line.epoch]
    return ", ".join([row, *variant, *([epoch] if epoch else [])])


def _reference(table: TableFile, rows: Sequence[ShownRow]) -> str | None:
    """Return the system of the first line of the row that the table's file names as reference."""
    return next((row.lines[0].system for row in rows if row.name == table.reference and row.lines), None)


def _note(table: TableFile) -> str | None:
    """Return the table's note with those of its columns."""
    notes = [table.note] if table.note else []
    notes += dict.fromkeys(f"Columns of {block.dataset}: {block.note}." for block in table.columns if block.note)
    return " ".join(notes) or None


def unmeasured(table: TableFile, row: str, result: TableResult) -> list[str]:
    """Return the datasets on which the paper has a row (or a plotted line) that was not measured there."""
    entry = table.rows[row]
    done = {run.dataset for run in result.runs if run.row == row}
    return [] if entry.kind == "quoted" else [name for name in datasets_of(table) if belongs(table, entry, name) and name not in done]


def _printed_decimals(table: TableFile, column: int) -> int:
    """Return the most decimals of a published value in the column."""
    printed = [values for row in table.rows.values() for values in (row.published, row.released, row.independent) if values is not None]
    return max((len(f"{row[column]:g}".partition(".")[2]) for row in printed if row[column] is not None), default=0)


def _columns(table: TableFile, rows: Sequence[ShownRow]) -> tuple[ShownColumn, ...]:
    measured = [line.cells for row in rows for line in row.lines]
    found = []
    for index, column in enumerate(table.flat_columns):
        decimals = _printed_decimals(table, index)
        means = [abs(cell.mean) for cells in measured if (cell := cells[index]) is not None and abs(cell.mean) >= NOTHING]
        # two significant digits for values far below 1, such as minutes per epoch
        small = 1 - floor(log10(min(means))) if means and column.unit != "per cent" else 0
        most = max(decimals, DECIMALS.get(column.unit, 1), small)
        stands_in_for = table.stand_ins.get(column.dataset)
        found.append(ShownColumn(**column._asdict(), printed_decimals=decimals, decimals=most, stands_in_for=stands_in_for))
    return tuple(found)


def _tolerances(table: TableFile) -> list[tuple[str, Tolerance]]:
    """Return (cells, tolerance) pairs: the table's or those of metric and dataset, then those of metrics, then those of rows."""
    found = [("every column", table.tolerance)] if table.tolerance is not None else _common_tolerances(table)
    rows = [(f"row {row.label}", row.tolerance) for row in table.rows.values() if row.tolerance is not None]
    return [*found, *table.tolerances.items(), *rows]


def _row(name: str, table: TableFile, key: str, result: TableResult, waiting: Waiting) -> ShownRow:
    row, missing = table.rows[key], unmeasured(table, key, result)
    runs = [run for run in result.runs if run.row == key]
    lines = _lines(name, table, row, runs)
    failed = {f"{run.label.removeprefix(f'{key} ')}, {run.dataset}, seed {run.seed}": run.reason for run in result.failed if run.row == key}
    return ShownRow(
        name=key,
        **row.model_dump(include={"label", "kind", "source", "note", "published", "released", "independent"}),
        independent_source=row.independent_source or (NONE_FOUND if row.kind != "quoted" and table.page is not None else None),
        status=_status(table, row, runs, missing),
        lines=lines,
        waits={on: row.lacks or waiting.get((key, on)) or _how_to_run(name, key, on if lines else None) for on in missing},
        failures=failed,
    )


def _common_tolerances(table: TableFile) -> list[tuple[str, Tolerance]]:
    """Return the tolerances of metric and dataset that judge some cell; one that several share is listed once with all their names."""
    found: dict[Tolerance, dict[str, None]] = {}
    for row in (row for row in table.rows.values() if row.kind != "quoted" and row.tolerance is None):
        for column, value in zip(table.flat_columns, row.published, strict=True):
            tolerance = table.tolerance_of(row, column)
            if value is not None and tolerance is not None and column.metric not in table.tolerances:
                found.setdefault(tolerance, {})[f"{metric_family(column.metric)} on {column.dataset}"] = None
    return [(", ".join(names), tolerance) for tolerance, names in found.items()]


def _unresolved(table: TableFile) -> Iterator[str]:
    """Yield pairs of rows with neighbouring published values within the tolerance, in the first judged column of each dataset."""
    for dataset in datasets_of(table):
        for index, column in enumerate(table.flat_columns):
            rows = [(row.published[index], row, table.tolerance_of(row, column)) for row in table.rows.values() if row.kind != "quoted"]
            judged = [(value, row, tolerance) for value, row, tolerance in rows if value is not None and tolerance is not None]
            if column.dataset != dataset or not judged:
                continue
            judged.sort(key=lambda entry: -entry[0])
            for (value, row, _), (other, near, tolerance) in pairwise(judged):
                if value - other <= tolerance.at(other):
                    places = f"{column.metric} on {dataset}"
                    yield f"{places}: {row.label} {value:g} and {near.label} {other:g} (tolerance {tolerance.at(other):.2g})"
            break


def _status(table: TableFile, row: Row, runs: Sequence[MeasuredRun], missing: Sequence[str]) -> Status:
    """Return the progress of the row on the paper's own datasets."""
    if row.kind == "quoted" or not runs:
        return "quoted" if row.kind == "quoted" else "not run"
    if all(run.dataset in table.stand_ins for run in runs):
        return "stand-in only"
    return "partly measured" if any(dataset not in table.stand_ins for dataset in missing) else "measured"


def _how_to_run(name: str, row: str, dataset: str | None) -> str:
    where = f" --dataset {dataset}" if dataset is not None else ""
    return f"dml reproduce {name} --row {row}{where} runs it"


def _lines(name: str, table: TableFile, row: Row, runs: Sequence[MeasuredRun]) -> tuple[ShownLine, ...]:
    """Return a line for each variant and epoch: the file's variants first, in its order."""
    found: defaultdict[tuple[str, Epoch], list[MeasuredRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.dataset, run.seed)):
        found[run.variant, run.epoch].append(run)
    variants = [*row.variants, *sorted({variant for variant, _ in found} - {*row.variants})]
    order = sorted(found, key=lambda place: (variants.index(place[0]), EPOCHS.index(place[1])))
    return tuple(_line(name, table, row, variant, epoch, found[variant, epoch]) for variant, epoch in order)


def _line(name: str, table: TableFile, row: Row, variant: str, epoch: Epoch, runs: Sequence[MeasuredRun]) -> ShownLine:
    # published values apply neither to the common track nor to other epochs
    printed = row.published if variant != COMMON and epoch == printed_epoch(name) else (None,) * len(row.published)
    return ShownLine(
        variant=variant,
        epoch=epoch,
        seeds=tuple(sorted({run.seed for run in runs})),
        cells=tuple(_cell(table, row, index, figure, runs) for index, figure in enumerate(printed)),
        runs=tuple(ShownRun(**run.model_dump(include=set(ShownRun.model_fields))) for run in runs),
        older_code=tuple(sorted({file for run in runs for file in run.older_code})),
    )


def _cell(table: TableFile, row: Row, index: int, printed: Value, runs: Sequence[MeasuredRun]) -> ShownCell | None:
    column = table.flat_columns[index]
    measured = [run for run in runs if run.dataset == column.dataset and column.metric in run.scores]
    if not measured:
        return None
    values = scores_by_seed((run.label, run.seed, column.factor * run.scores[column.metric]) for run in measured)[measured[0].label]
    mean, half_width = mean_over_seeds(list(values.values()))
    tolerance = table.tolerance_of(row, column)
    tested = tested_on(measured[0].scores)
    shown = ShownCell(values=values, mean=mean, half_width=half_width if len(values) > 1 else None, **tested)
    if printed is None or tolerance is None:
        return shown
    num_queries = tested["num_queries"] if is_share_of_queries(column.metric) else None
    rounding = 0.5 * 10 ** -_printed_decimals(table, index)
    verdict = judge(list(values.values()), printed, tolerance.at(printed), num_queries, column.factor, rounding)
    judged = {"verdict": verdict.judgement, "low": verdict.low, "high": verdict.high, "is_equal": verdict.is_equal, "says": str(verdict)}
    return shown.model_copy(update={"tolerance": tolerance.at(printed), **judged})
