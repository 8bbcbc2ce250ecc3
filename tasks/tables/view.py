"""Compute what is shown of a table (`tasks.tables.shown`) from its file and its result."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from math import floor, log10

from dml_core.epochs import EPOCHS, Epoch
from dml_core.evaluation.metric_info import metric_info
from dml_core.evaluation.statistics.comparing import tested_on
from dml_core.evaluation.statistics.over_seeds import summarise_seeds
from dml_core.evaluation.statistics.paired import MIN_SEEDS
from tasks.runs.comparable import UNKNOWN, Today, scores_by_seed, select
from tasks.runs.tuned import STANDING
from tasks.tables.file import Row, TableFile, Value
from tasks.tables.judging import compare_lines, compared_epoch, fewest_for_equality, judge, judge_claims, rank_lines
from tasks.tables.present import is_of_other_code
from tasks.tables.result import NOT_THE_ROWS, MeasuredRun, TableResult
from tasks.tables.runs import belongs, paper_protocol
from tasks.tables.shown import (
    EPOCH_NOTES,
    VERDICTS,
    Counted,
    JudgedClaim,
    ShownCell,
    ShownColumn,
    ShownLine,
    ShownRow,
    ShownRun,
    ShownTable,
    ShownTolerance,
    Status,
)
from tasks.tables.tolerances import Tolerance, metric_family

DECIMALS = {"share": 3, "distance": 3}  # least number for a measured value; 1 for other units
NONE_FOUND = "none found"
NOTHING = 1e-5  # smaller values are rounding errors, shown as 0
Waiting = Mapping[tuple[str, str], str]
Line = tuple[str, str, Epoch]  # row, variant, epoch


def shown_table(name: str, table: TableFile, result: TableResult, waiting: Waiting | None = None, today: Today = UNKNOWN) -> ShownTable:
    """Return a table with its measurements: every mean is over runs that differ only in the seed, on the present data.

    Args:
        name: `<paper>/<file>`.
        waiting: (row, dataset) -> what it waits for, if more is known than that it was not run.
        today: present datasets and settings (`tasks.tables.present`). Runs with others are omitted and named; runs with former settings
            are shown and named if their line has no run with the present ones.
    """
    result, left_out = comparable(result, today)
    protocol = paper_protocol(name)
    epoch = protocol.prints
    by_line = _by_line(table, result)
    rows = tuple(_row(name, table, row, result, waiting or {}, by_line) for row in table.rows)
    lines = [line for row in rows for line in row.lines]
    columns = _columns(table, lines)
    claims = judge_claims(table, result, epoch)
    compared, reference = compared_lines(rows, table.reference, epoch)
    return ShownTable(
        name=name,
        **table.model_dump(include={"title", "page", "states"}),
        note=_note(table),
        made=result.made,
        columns=columns,
        rows=rows,
        tolerances=_tolerances(table, columns, lines),
        unresolved=tuple(_unresolved(table)),
        claims=claims,
        independent=protocol.independent,
        judged_epoch=epoch,
        own_data=_counted({*table.datasets} - table.stand_ins.keys(), columns, rows, claims),
        stand_in=_counted({*table.stand_ins}, columns, rows, claims),
        gone=tuple(sorted({run.row for run in result.runs} - table.rows.keys())),
        comparisons=compare_lines(columns, compared, reference),
        ranking=rank_lines(columns, compared, table.tuned_on),
        left_out=left_out,
    )


def comparable(result: TableResult, today: Today = UNKNOWN) -> tuple[TableResult, tuple[str, ...]]:
    """Return a table's result with only the runs that may be averaged and compared, and the lines about runs of `select`."""
    runs, left_out = select(result.runs, lambda run: run.facts, today)
    return result.model_copy(update={"runs": runs}), left_out


def compared_lines(rows: Sequence[ShownRow], reference: str | None, printed: Epoch) -> tuple[list[ShownLine], str | None]:
    """Return the lines that are compared, all at one epoch, and the system that is the reference, if that row was measured.

    The reference is the row's first line that is compared; if none is, the other row's line with its settings. A line has no cell on a
    dataset on which another one has the same settings: it is the same system. `printed` is the epoch of the published values.
    """
    epoch = compared_epoch(printed, {line.epoch for row in rows for line in row.lines})
    lines = {row.name: [line for line in row.lines if line.epoch == epoch] for row in rows}
    cells = [(line.system, cell.same_as) for line in lines.get(reference or "", ()) for cell in line.cells if cell is not None]
    systems = [*(system for system, same_as in cells if same_as is None), *(same_as for _, same_as in cells if same_as is not None)]
    return [_without_repeated(line) for of_row in lines.values() for line in of_row], next(iter(systems), None)


def _without_repeated(line: ShownLine) -> ShownLine:
    return line.model_copy(update={"cells": tuple(None if cell is None or cell.same_as else cell for cell in line.cells)})


def unmeasured(table: TableFile, row: str, result: TableResult) -> list[str]:
    """Return the datasets on which the paper has a row (or a plotted line) that was not measured there, as `TableResult.of_rows`."""
    entry = table.rows[row]
    measured = {run.dataset for run in result.of_rows.runs if run.row == row}
    return [] if entry.kind == "quoted" else [name for name in table.datasets if belongs(table, entry, name) and name not in measured]


def _counted(datasets: set[str], columns: Sequence[ShownColumn], rows: Sequence[ShownRow], claims: Sequence[JudgedClaim]) -> Counted:
    """Return what was measured and judged on these datasets."""
    verdicts: Counter[str | None] = Counter()
    for row in rows:
        judged = {line.variant for line in row.lines} - {*NOT_THE_ROWS}  # one verdict of the variants with the same settings
        for line in row.lines:
            cells = [cell for column, cell in zip(columns, line.cells, strict=True) if cell and column.dataset in datasets]
            verdicts.update(cell.verdict for cell in cells if cell.same_as not in judged)
    judgements = Counter(claim.judgement for claim in claims if claim.dataset in datasets and claim.judgement != "not decided")
    return Counted(
        rows=sum(
            any(run.dataset in datasets for line in row.lines if line.variant not in NOT_THE_ROWS for run in line.runs) for row in rows
        ),
        verdicts={verdict: verdicts[verdict] for verdict in VERDICTS if verdicts[verdict]},
        claims=dict(sorted(judgements.items())),
    )


def _note(table: TableFile) -> str | None:
    """Return the table's note with those of its columns."""
    notes = [table.note] if table.note else []
    notes += dict.fromkeys(f"Columns of {block.dataset}: {block.note}." for block in table.columns if block.note)
    return " ".join(notes) or None


# ---------------------------------------------------------------- columns and tolerances


def _published_decimals(table: TableFile, column: int) -> int:
    """Return the decimals of the paper's values in the column: the most of its metric in any column, since a YAML number drops a last 0."""
    columns = table.flat_columns
    kind = metric_family(columns[column].metric), columns[column].unit
    alike = [index for index, other in enumerate(columns) if (metric_family(other.metric), other.unit) == kind]
    return max((_decimals(row.published[index]) for row in table.rows.values() for index in alike), default=0)


def _decimals(value: Value) -> int:
    return 0 if value is None else len(f"{value:f}".rstrip("0").partition(".")[2])


def _columns(table: TableFile, lines: Sequence[ShownLine]) -> tuple[ShownColumn, ...]:
    columns = []
    for index, column in enumerate(table.flat_columns):
        others = [values[index] for row in table.rows.values() for values in (row.released, row.independent) if values is not None]
        printed = max(_published_decimals(table, index), *map(_decimals, others), 0)
        means = [abs(cell.mean) for line in lines if (cell := line.cells[index]) is not None and abs(cell.mean) >= NOTHING]
        # two significant digits for values far below 1, such as minutes per epoch
        small = 1 - floor(log10(min(means))) if means and column.unit != "per cent" else 0
        decimals = max(printed, DECIMALS.get(column.unit, 1), small)
        stands_in_for = table.stand_ins.get(column.dataset)
        columns.append(ShownColumn(**column._asdict(), printed_decimals=printed, decimals=decimals, stands_in_for=stands_in_for))
    return tuple(columns)


def _tolerances(table: TableFile, columns: Sequence[ShownColumn], lines: Sequence[ShownLine]) -> tuple[ShownTolerance, ...]:
    """Return the tolerances: the table's or those of metric and dataset, then those of metrics, then those of rows."""
    cells = [(column, cell) for line in lines for column, cell in zip(columns, line.cells, strict=True) if cell is not None]
    num_queries = {column.dataset: cell.num_queries for column, cell in cells if cell.num_queries is not None}
    general = [("every column", table.tolerance)] if table.tolerance is not None else _common_tolerances(table)
    of_rows = [(f"row {row.label}", row.tolerance) for row in table.rows.values() if row.tolerance is not None]
    tolerances = [*general, *table.tolerances.items(), *of_rows]
    return tuple(
        ShownTolerance(of=cells, value=given.value, says=given.says + _fewest_seeds(table, given, num_queries), reason=given.reason)
        for cells, given in tolerances
    )


def _fewest_seeds(table: TableFile, tolerance: Tolerance, num_queries: Mapping[str, int]) -> str:
    """Return in words how many seeds "mean equal" needs in the measured columns with a tolerance, if more than any verdict."""
    needed = {
        fewest_for_equality(value, tolerance.at(value), num_queries[column.dataset], column.factor)
        for row in table.rows.values()
        for column, value in zip(table.flat_columns, row.published, strict=True)
        if value is not None and column.dataset in num_queries and metric_info(column.metric).is_share_of_queries
        if row.kind != "quoted"
        and table.tolerance_of(row, column) == tolerance
        and tolerance.at(value) > 0  # it is 0 at a binomial 0 or 100
    }
    if max(needed, default=MIN_SEEDS) == MIN_SEEDS:
        return ""
    return f"; mean equal needs at least {' to '.join(map(str, sorted({min(needed), max(needed)})))} seeds"


def _common_tolerances(table: TableFile) -> list[tuple[str, Tolerance]]:
    """Return (cells, tolerance of their metric and dataset) for the judged cells; a tolerance that several share is listed once."""
    names: dict[Tolerance, dict[str, None]] = {}
    for row in (row for row in table.rows.values() if row.kind != "quoted" and row.tolerance is None):
        for column, value in zip(table.flat_columns, row.published, strict=True):
            tolerance = table.tolerance_of(row, column)
            if value is not None and tolerance is not None and column.metric not in table.tolerances:
                names.setdefault(tolerance, {})[f"{metric_family(column.metric)} on {column.dataset}"] = None
    return [(", ".join(cells), tolerance) for tolerance, cells in names.items()]


def _unresolved(table: TableFile) -> Iterator[str]:
    """Yield pairs of rows with neighbouring published values within the tolerance, in the first judged column of each dataset."""
    for dataset in table.datasets:
        for index, column in enumerate(table.flat_columns):
            rows = [(row.published[index], row, table.tolerance_of(row, column)) for row in table.rows.values() if row.kind != "quoted"]
            judged = [(value, row, tolerance) for value, row, tolerance in rows if value is not None and tolerance is not None]
            if column.dataset != dataset or not judged:
                continue
            judged.sort(key=lambda entry: -entry[0])
            for (value, row, _), (lower, next_row, tolerance) in pairwise(judged):
                if value - lower <= tolerance.at(lower):
                    rows_named = f"{row.label} {value:g} and {next_row.label} {lower:g}"
                    yield f"{column.metric} on {dataset}: {rows_named} (tolerance {tolerance.at(lower):.2g})"
            break


# ---------------------------------------------------------------- rows


def _row(
    name: str, table: TableFile, key: str, result: TableResult, waiting: Waiting, by_line: Mapping[Line, Sequence[MeasuredRun]]
) -> ShownRow:
    row, missing, own = table.rows[key], unmeasured(table, key, result), result.of_rows
    lines = _lines(name, table, key, by_line)
    failed_on = {run.dataset for run in own.failed if run.row == key}
    commands = {on: _how_to_run(name, key, on, own) for on in missing if on not in failed_on}
    reasons = {on: row.lacks or waiting.get((key, on)) or commands.get(on) for on in missing}
    return ShownRow(
        name=key,
        **row.model_dump(include={"label", "kind", "source", "note", "published", "released", "independent"}),
        independent_source=row.independent_source or (NONE_FOUND if row.kind != "quoted" and table.page is not None else None),
        status=_status(table, key, own, missing, any(on not in table.stand_ins for on in failed_on)),
        lines=lines,
        waits={on: reason for on, reason in reasons.items() if reason is not None},
        failures={
            f"{run.label.removeprefix(f'{key} ')}, {run.dataset}, seed {run.seed}": run.reason for run in result.failed if run.row == key
        },
    )


def _status(table: TableFile, key: str, result: TableResult, missing: Sequence[str], has_failed: bool) -> Status:
    """Return the progress of the row on the paper's own datasets."""
    runs = [run for run in result.runs if run.row == key]
    if table.rows[key].kind == "quoted":
        return "quoted"
    if not runs:
        return "failed" if has_failed else "not run"
    if all(run.dataset in table.stand_ins for run in runs):
        return "stand-in only"
    return "partly measured" if any(dataset not in table.stand_ins for dataset in missing) else "measured"


def _how_to_run(name: str, row: str, dataset: str, result: TableResult) -> str:
    """Return the command that runs a row on a dataset; where no row was run, it is one command for all."""
    if name == STANDING:
        return f"start it with dml reproduce --dataset {dataset}"
    has_runs = any(run.dataset == dataset for run in result.runs)
    which = f" --row {row}" if has_runs else ""
    where = f" --dataset {dataset}" if result.runs and (not has_runs or any(run.row == row for run in result.runs)) else ""
    return f"start it with dml reproduce {name}{which}{where}"


def _by_line(table: TableFile, result: TableResult) -> dict[Line, list[MeasuredRun]]:
    """Return the runs of each line: rows in the file's order, in each the file's variants first, in its order."""
    by_line: defaultdict[Line, list[MeasuredRun]] = defaultdict(list)
    for run in sorted(result.runs, key=lambda run: (run.dataset, run.seed)):
        if run.row in table.rows:
            by_line[run.row, run.variant, run.epoch].append(run)

    def place(line: Line) -> tuple[int, int, str, int]:
        row, variant, epoch = line
        own = table.rows[row].variants
        return [*table.rows].index(row), own.index(variant) if variant in own else len(own), variant, EPOCHS.index(epoch)

    return {line: by_line[line] for line in sorted(by_line, key=place)}


def _systems(table: TableFile, lines: Collection[Line]) -> dict[Line, str]:
    """Return the lines' names in comparisons: of a row with one line, which has its first variant, the label alone."""
    labels = Counter(row.label for row in table.rows.values())
    num_lines = Counter(row for row, *_ in lines)
    systems = {}
    for row, variant, epoch in lines:
        label = table.rows[row].label
        label = f"{label} ({row})" if labels[label] > 1 else label
        is_plain = num_lines[row] == 1 and variant in table.rows[row].variants[:1]
        systems[row, variant, epoch] = ", ".join(filter(None, [label, "" if is_plain else variant, EPOCH_NOTES[epoch]]))
    return systems


def _compared(table: TableFile, by_line: Mapping[Line, Sequence[MeasuredRun]]) -> dict[tuple[str, str | None], Line]:
    """Return (dataset, settings) -> the line that is compared of those with them: of most seeds, then the reference's, then the first."""
    seeds: defaultdict[tuple[str, str | None], dict[Line, int]] = defaultdict(dict)
    for line in sorted(by_line, key=lambda line: line[0] != table.reference):
        for run in by_line[line]:
            of_settings = seeds[run.dataset, run.facts.settings]
            of_settings[line] = of_settings.get(line, 0) + 1
    return {settings: max(numbers, key=numbers.__getitem__) for settings, numbers in seeds.items()}


def _lines(name: str, table: TableFile, key: str, by_line: Mapping[Line, Sequence[MeasuredRun]]) -> tuple[ShownLine, ...]:
    """Return the row's lines, in the order of `by_line`."""
    row, systems, compared = table.rows[key], _systems(table, by_line), _compared(table, by_line)
    lines = []
    for (of, variant, epoch), of_line in by_line.items():
        if of != key:
            continue
        same_as: dict[str, str] = {}
        for dataset, run in {run.dataset: run for run in of_line}.items():  # the runs of a line share their settings on each dataset
            other = compared[dataset, run.facts.settings]
            if other != (key, variant, epoch):
                same_as[dataset] = other[1] if other[0] == key else systems[other]
        # published values apply neither to the common track and tuned settings nor to other epochs
        is_printed = variant not in NOT_THE_ROWS and epoch == paper_protocol(name).prints
        printed = row.published if is_printed else (None,) * len(row.published)
        line = ShownLine(
            variant=variant,
            epoch=epoch,
            seeds=tuple(sorted({run.seed for run in of_line})),
            cells=tuple(_cell(table, row, index, value, of_line, same_as) for index, value in enumerate(printed)),
            runs=tuple(
                ShownRun(**run.model_dump(include=set(ShownRun.model_fields)), has_other_code=is_of_other_code(run)) for run in of_line
            ),
            older_code=tuple(sorted({file for run in of_line for file in run.older_code})),
            system=systems[key, variant, epoch],
        )
        lines.append(line)
    return tuple(lines)


def _cell(
    table: TableFile, row: Row, index: int, printed: Value, runs: Sequence[MeasuredRun], same_as: Mapping[str, str]
) -> ShownCell | None:
    column = table.flat_columns[index]
    measured = [run for run in runs if run.dataset == column.dataset and column.metric in run.scores]
    if not measured:
        return None
    values = scores_by_seed((run.label, run.seed, column.factor * run.scores[column.metric]) for run in measured)[measured[0].label]
    mean, half_width, _ = summarise_seeds(list(values.values()))
    tolerance = table.tolerance_of(row, column)
    tested = tested_on(measured[0].scores)
    cell = ShownCell(values=values, mean=mean, half_width=half_width, same_as=same_as.get(column.dataset), **tested)
    if printed is None or tolerance is None:
        return cell
    num_queries = tested["num_queries"] if metric_info(column.metric).is_share_of_queries else None
    rounding = 0.5 * 10 ** -_published_decimals(table, index)
    verdict = judge(list(values.values()), printed, tolerance.at(printed), num_queries, column.factor, rounding)
    return cell.model_copy(update={"tolerance": tolerance.at(printed), **asdict(verdict)})
