"""A table as it is shown: what the paper printed, what was measured of it and what that says, worked out once for pages, Markdown and JSON.

The JSON of a table is this record as it stands; docs/tables.md describes it. It depends on the table's file and its result alone.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import floor, log10
from typing import Literal

from dml_core.evaluation.comparing import Comparison, is_share_of_queries, tested_on
from dml_core.evaluation.confidence import mean_over_seeds
from dml_core.evaluation.mean_ranks import Ranking
from dml_core.training.epochs import EPOCHS, Epoch
from tasks.runs.comparable import UNKNOWN, Today, scores_by_seed, select
from tasks.runs.protocols import COMMON, protocol_names, read_protocol
from tasks.runs.records import Record
from tasks.tables.claims import JudgedClaim, judge_claims
from tasks.tables.comparing import compare_lines, rank_lines
from tasks.tables.file import Column, Row, TableFile, Tolerance, Value
from tasks.tables.result import MeasuredRun, TableResult
from tasks.tables.runs import belongs, datasets_of
from tasks.tables.verdicts import Judgement, judge

FORMAT = 2
EPOCH_NOTES = {
    "last": "",
    "best_validation": "best epoch on held-out training classes",
    "oracle": "oracle epoch (chosen on the test classes)",
}
DECIMALS = {"share": 3, "distance": 3}  # of a measured figure at least; elsewhere 1
NOTHING = 1e-5  # what is smaller is rounding, and shown as 0
Waiting = Mapping[tuple[str, str], str]
Status = Literal["quoted", "measured", "partly measured", "not run"]


class ShownColumn(Record):
    """One column: what it measures, on what, in which unit (per cent, share, minutes, distance, count).

    Attributes:
        printed_decimals: the most that a figure of the paper has here; decimals: those of measured figures.
    """

    dataset: str
    metric: str
    unit: str
    printed_decimals: int
    decimals: int

    def printed(self, value: Value) -> str:
        """A figure of the paper as it prints it."""
        return "-" if value is None else f"{value:.{self.printed_decimals}f}"

    def measured(self, value: float) -> str:
        """A measured figure."""
        return f"{value:.{self.decimals}f}"


class ShownCell(Record):
    """What was measured of a figure, in the column's unit.

    Attributes:
        values: seed -> value.
        mean, half_width: the latter of the 95 % interval over seeds; None for one seed.
        tolerance: t of the equivalence test; None where there is none.
        verdict: whether the published figure may be one of our runs; None where the paper prints none.
        low, high: the prediction interval of one run, in which it then lies; None for fewer than three seeds.
        is_equal: whether the mean is equal to the published figure within the tolerance.
        says: the verdict in words.
        num_queries, num_classes: that the values are of, where the scores say it.
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
    """By how much a mean may differ from the printed figure and be equal to it, and why; `of` says of which cells."""

    of: str
    value: float
    reason: str


class ShownRun(Record):
    """One run behind a line: where it is, and what it is known by. `figures` is a folder's key in the store."""

    dataset: str
    project_dataset: str
    seed: int
    identity: str
    figures: str
    seconds: float | None


class ShownLine(Record):
    """One way in which a row was measured.

    Attributes:
        variant: of the protocol.
        epoch: whose weights were scored.
        seeds: all that ran, on whichever dataset.
        cells: one for each column; None where nothing was measured.
        runs: by dataset and seed.
        older_code: files that differ from those that made some of its runs, which were kept all the same.
        system: how comparisons call it: by its row, and by variant and epoch where the row has several lines.
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
        """The line in words: variant, epoch, seeds."""
        epoch = [EPOCH_NOTES[self.epoch]] if EPOCH_NOTES[self.epoch] else []
        older = ["made by older code"] if self.older_code else []
        variant = "common track, not judged" if self.variant == COMMON else self.variant
        return ", ".join([variant, *epoch, f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}", *older])


class ShownRow(Record):
    """One row of the paper's table.

    Attributes:
        name, label, kind, source, note, published, released, independent: as the table's file has them.
        status: whether every dataset on which the paper has the row was measured.
        lines: how it was measured, the default variant first.
        waits: dataset -> what has to be there or be done before the row is measured on it.
        failures: "variant, dataset, seed" -> why, of the last time.
    """

    name: str
    label: str
    kind: Literal["own", "rerun", "quoted"]
    source: str | None
    note: str | None
    published: tuple[Value, ...]
    released: tuple[Value, ...] | None
    independent: tuple[Value, ...] | None
    status: Status
    lines: tuple[ShownLine, ...] = ()
    waits: dict[str, str] = {}
    failures: dict[str, str] = {}

    @property
    def waiting(self) -> dict[str, list[str]]:
        """What it waits for -> on which datasets."""
        return {why: [dataset for dataset, other in self.waits.items() if other == why] for why in self.waits.values()}


class ShownTable(Record):
    """A table or figure of a paper, with all that was measured of it.

    Attributes:
        format: of this record; another number where a reader has to be changed.
        name: `<paper>/<file>`.
        title, page, states, note: as the file has them.
        made: git commit of the last run.
        tolerances: of verdicts; a later one goes before an earlier one.
        verdicts: how many cells have each, after the last epoch.
        gone: rows that have runs and are no longer in the file.
        comparisons: of the measured lines with each other, by the first metric of each dataset that has a best; where two share two seeds.
        ranking: of the lines over the datasets that have a metric in common, or over the seeds of the one dataset there is.
        left_out: runs that are not shown because they are on other data or of other settings than those that are, a line each.
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
    claims: tuple[JudgedClaim, ...]
    verdicts: dict[str, int]
    gone: tuple[str, ...]
    comparisons: tuple[Comparison, ...] = ()
    ranking: Ranking | None = None
    left_out: tuple[str, ...] = ()

    @property
    def told(self) -> list[str]:
        """What the comparisons and the ranking say, a line each; of several datasets each is named."""
        named = len({column.dataset for column in self.columns}) > 1
        said = [f"{f'{found.dataset}: ' if named else ''}{found.sentence}" for found in self.comparisons]
        return [*said, *([self.ranking.sentence] if self.ranking is not None and self.ranking.over == "datasets" else [])]

    def is_bold(self, line: ShownLine, column: int) -> bool:
        """Whether the line's cell is in the set of the best of its comparison."""
        place = self.columns[column].dataset, self.columns[column].metric
        return any((found.dataset, found.metric) == place and line.system in found.best_set for found in self.comparisons)

    @property
    def num_to_run(self) -> int:
        """Rows that are not quoted."""
        return sum(row.kind != "quoted" for row in self.rows)

    @property
    def num_measured(self) -> int:
        """Rows of which something was measured."""
        return sum(bool(row.lines) for row in self.rows)


def shown_table(name: str, table: TableFile, result: TableResult, waiting: Waiting | None = None, today: Today = UNKNOWN) -> ShownTable:
    """A table with what was measured of it: every mean is over runs that differ in nothing but the seed, on the data of today.

    Args:
        name: `<paper>/<file>`.
        table: its file.
        result: what was measured so far.
        waiting: (row, dataset) -> what it waits for, where more is known than that it was not run.
        today: the datasets and settings as they are now (`tasks.tables.present`); runs of others are left out and named.
    """
    result, left_out = comparable(result, today)
    rows = _with_systems([_row(name, table, row, result, waiting or {}) for row in table.rows])
    lines = [line for row in rows for line in row.lines]
    cells = [cell for row in rows for line in row.lines if line.epoch == "last" for cell in line.cells]
    columns = _columns(table, rows)
    verdicts = Counter(cell.verdict for cell in cells if cell is not None and cell.verdict is not None)
    return ShownTable(
        name=name,
        **table.model_dump(include={"title", "page", "states"}),
        note=_note(table),
        made=result.made,
        columns=columns,
        rows=rows,
        tolerances=tuple(ShownTolerance(of=of, value=found.value, reason=found.reason) for of, found in _tolerances(table)),
        claims=judge_claims(table, result),
        verdicts={verdict: verdicts[verdict] for verdict in ("compatible", "above", "below", "undecided") if verdicts[verdict]},
        gone=tuple(sorted({run.row for run in result.runs} - table.rows.keys())),
        comparisons=compare_lines(columns, lines, _reference(table, rows)),
        ranking=rank_lines(columns, lines),
        left_out=left_out,
    )


def comparable(result: TableResult, today: Today = UNKNOWN) -> tuple[TableResult, tuple[str, ...]]:
    """A table's result with the runs that may be averaged and compared, and a line for those of each line that may not."""
    found = select(result.runs, lambda run: run.facts, today)
    return result.model_copy(update={"runs": found.runs}), found.left_out


def _with_systems(rows: Sequence[ShownRow]) -> tuple[ShownRow, ...]:
    """With a name for each line that no other line has."""
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
    """The system of the row that the table's file names, in its first line."""
    return next((row.lines[0].system for row in rows if row.name == table.reference and row.lines), None)


def _note(table: TableFile) -> str | None:
    """The table's note, with those of its columns."""
    notes = [table.note] if table.note else []
    notes += dict.fromkeys(f"Columns of {block.dataset}: {block.note}." for block in table.columns if block.note)
    return " ".join(notes) or None


def unmeasured(table: TableFile, row: str, result: TableResult) -> list[str]:
    """The datasets on which the paper has a row, or a line, and on which it was not measured."""
    entry = table.rows[row]
    done = {run.dataset for run in result.runs if run.row == row}
    return [] if entry.kind == "quoted" else [name for name in datasets_of(table) if belongs(table, entry, name) and name not in done]


def _columns(table: TableFile, rows: Sequence[ShownRow]) -> tuple[ShownColumn, ...]:
    printed = [values for row in table.rows.values() for values in (row.published, row.released, row.independent) if values is not None]
    measured = [line.cells for row in rows for line in row.lines]
    found = []
    for index, column in enumerate(table.flat_columns):
        decimals = max((len(f"{row[index]:g}".partition(".")[2]) for row in printed if row[index] is not None), default=0)
        means = [abs(cell.mean) for cells in measured if (cell := cells[index]) is not None and abs(cell.mean) >= NOTHING]
        # of what is far below 1, as minutes of an epoch are, two digits
        small = 1 - floor(log10(min(means))) if means and column.unit != "per cent" else 0
        most = max(decimals, DECIMALS.get(column.unit, 1), small)
        found.append(ShownColumn(**column._asdict(), printed_decimals=decimals, decimals=most))
    return tuple(found)


def _tolerances(table: TableFile) -> list[tuple[str, Tolerance]]:
    """(which cells, tolerance): the table's, then those of metrics, then those of rows."""
    found = [("every column", table.tolerance)] if table.tolerance is not None else []
    rows = [(f"row {row.label}", row.tolerance) for row in table.rows.values() if row.tolerance is not None]
    return [*found, *table.tolerances.items(), *rows]


def _row(name: str, table: TableFile, key: str, result: TableResult, waiting: Waiting) -> ShownRow:
    row, missing = table.rows[key], unmeasured(table, key, result)
    lines = _lines(name, table, row, [run for run in result.runs if run.row == key])
    status: Status = "quoted" if row.kind == "quoted" else "not run" if not lines else "partly measured" if missing else "measured"
    failed = {run.partition(" ")[2]: why for run, why in sorted(result.failures.items()) if run.partition(" ")[0] == key}
    return ShownRow(
        name=key,
        **row.model_dump(include={"label", "kind", "source", "note", "published", "released", "independent"}),
        status=status,
        lines=lines,
        waits={on: row.lacks or waiting.get((key, on)) or _how_to_run(name, key, on if lines else None) for on in missing},
        failures=failed,
    )


def _how_to_run(name: str, row: str, dataset: str | None) -> str:
    where = f" --dataset {dataset}" if dataset is not None else ""
    return f"dml reproduce {name} --row {row}{where} runs it"


def _lines(name: str, table: TableFile, row: Row, runs: Sequence[MeasuredRun]) -> tuple[ShownLine, ...]:
    """A line for each variant and epoch: the file's variants first, in its order."""
    found: defaultdict[tuple[str, Epoch], list[MeasuredRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.dataset, run.seed)):
        found[run.variant, run.epoch].append(run)
    variants = [*row.variants, *sorted({variant for variant, _ in found} - {*row.variants})]
    order = sorted(found, key=lambda place: (variants.index(place[0]), EPOCHS.index(place[1])))
    has_chosen = "oracle" in (row.epochs or _protocol_epochs(row.protocol or name.partition("/")[0]))
    return tuple(_line(table, row, variant, epoch, found[variant, epoch], has_chosen) for variant, epoch in order)


def _protocol_epochs(name: str) -> tuple[Epoch, ...]:
    """Of which epochs the paper's own figures are, by its protocol."""
    return read_protocol(name).epochs if name in protocol_names() else ("last",)


def _line(table: TableFile, row: Row, variant: str, epoch: Epoch, runs: Sequence[MeasuredRun], has_chosen: bool) -> ShownLine:
    """`has_chosen`: the paper printed its best epoch by the test classes; an oracle epoch of ours was chosen alike."""
    printed = row.published if variant != COMMON else (None,) * len(row.published)  # the common track is not the paper's
    num_looks = max((run.training.get("num_epochs", 1) for run in runs), default=1) if has_chosen and epoch != "oracle" else 1
    return ShownLine(
        variant=variant,
        epoch=epoch,
        seeds=tuple(sorted({run.seed for run in runs})),
        cells=tuple(_cell(table, row, column, figure, runs, num_looks) for column, figure in zip(table.flat_columns, printed, strict=True)),
        runs=tuple(ShownRun(**run.model_dump(include=set(ShownRun.model_fields))) for run in runs),
        older_code=tuple(sorted({file for run in runs for file in run.older_code})),
    )


def _cell(table: TableFile, row: Row, column: Column, printed: Value, runs: Sequence[MeasuredRun], num_looks: int) -> ShownCell | None:
    measured = [run for run in runs if run.dataset == column.dataset and column.metric in run.scores]
    if not measured:
        return None
    values = scores_by_seed((run.label, run.seed, column.factor * run.scores[column.metric]) for run in measured)[measured[0].label]
    mean, half_width = mean_over_seeds(list(values.values()))
    tolerance = table.tolerance_of(row, column.metric)
    tested = tested_on(measured[0].scores)
    shown = ShownCell(values=values, mean=mean, half_width=half_width if len(values) > 1 else None, **tested)
    if printed is None or tolerance is None:
        return shown
    num_queries = tested["num_queries"] if is_share_of_queries(column.metric) else None
    verdict = judge(list(values.values()), printed, tolerance.value, num_looks, num_queries, column.factor)
    judged = {"verdict": verdict.judgement, "low": verdict.low, "high": verdict.high, "is_equal": verdict.is_equal, "says": str(verdict)}
    return shown.model_copy(update={"tolerance": tolerance.value, **judged})
