"""A table as it is shown: each row's published figures, and below them what was measured, with the verdict on each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dml_core.evaluation.confidence import mean_over_seeds
from tasks.runs.protocols import COMMON
from tasks.tables.file import Column, Row, TableFile, run_label
from tasks.tables.verdicts import Verdict, judge

FACTORS = {"per cent": 100.0}  # from a score of the evaluator to the column's unit
Scores = Mapping[str, float]
Measured = Mapping[tuple[str, str], Sequence[Scores]]


@dataclass(frozen=True)
class Cell:
    """A figure and what was measured of it: None where the paper has none, or nothing was measured.

    Attributes:
        mean, half_width: of the measured values in the column's unit, the latter of the 95 % interval over seeds.
        verdict: where both are there.
    """

    published: float | None
    mean: float | None = None
    half_width: float | None = None
    verdict: Verdict | None = None

    def __str__(self) -> str:
        if self.mean is None:
            return "-"
        spread = f" ± {self.half_width:.1f}" if self.half_width is not None else ""
        return f"{self.mean:.1f}{spread}" + (f" {self.verdict}" if self.verdict is not None else "")


def measured_cells(table: TableFile, row: Row, label: str, measured: Measured) -> list[Cell]:
    """The cells of a row for one of the labels that it was measured under.

    Args:
        table: the table of the row.
        row: whose published figures count.
        label: of its runs, as `run_label` makes it.
        measured: (label, dataset) -> the scores of each seed, by the evaluator's names, as fractions.
    """
    return [_cell(table, row, column, index, measured.get((label, column.dataset), ())) for index, column in enumerate(table.flat_columns)]


def _cell(table: TableFile, row: Row, column: Column, index: int, seeds: Sequence[Scores]) -> Cell:
    values = [FACTORS.get(column.unit, 1.0) * scores[column.metric] for scores in seeds if column.metric in scores]
    published = row.published[index]
    if not values:
        return Cell(published)
    mean, half_width = mean_over_seeds(values)
    tolerance = row.tolerance or table.tolerance
    verdict = judge(values, published, tolerance.value) if published is not None and tolerance is not None else None
    return Cell(published, mean, half_width if len(values) > 1 else None, verdict)


def lines(table: TableFile, measured: Measured) -> list[list[str]]:
    """The whole table: a header; for each row its published figures, other sources' figures, and a line for each way it was measured."""
    header = ["row", "figures", *(f"{column.metric} {column.dataset}" for column in table.flat_columns)]
    found = [header]
    for row_name, row in table.rows.items():
        kind = f"quoted: {row.source}" if row.kind == "quoted" else f"published, {row.kind}"
        found.append([row.label, kind, *map(_figure, row.published)])
        for what in ("released", "independent"):
            if (values := getattr(row, what)) is not None:
                found.append(["", what, *map(_figure, values)])
        for variant in row.variants:
            label = run_label(row_name, variant)
            seeds = max((len(measured.get((label, column.dataset), ())) for column in table.flat_columns), default=0)
            if seeds:
                cells = measured_cells(table, row, label, measured)
                found.append(["", f"{variant}, {_seeds(seeds)}", *map(str, cells)])
        common = {place: scores for place, scores in measured.items() if place[0] == run_label(row_name, COMMON)}
        if common:
            unjudged = row.model_copy(update={"published": (None,) * len(row.published)})
            cells = measured_cells(table, unjudged, run_label(row_name, COMMON), common)
            found.append(["", f"common track, {_seeds(max(map(len, common.values())))}, not judged", *map(str, cells)])
        if row.lacks is not None:
            found.append(["", f"not run: {row.lacks}", *([""] * len(table.flat_columns))])
    return found


def as_markdown(name: str, table: TableFile, measured: Measured) -> str:
    """The table as a page."""
    rows = lines(table, measured)
    rule = f"|{'|'.join('---' for _ in rows[0])}|"
    body = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    notes = [f"{row.label}: {row.note}." for row in table.rows.values() if row.note]
    tolerance = f"Tolerance: {table.tolerance.value:g} ({table.tolerance.reason})." if table.tolerance is not None else ""
    parts = [f"# {name}: {table.title}", table.states, "\n".join([body[0], rule, *body[1:]]), tolerance, table.note or "", *notes]
    return "\n\n".join(part for part in parts if part) + "\n"


def _seeds(number: int) -> str:
    return f"{number} seed{'s' if number > 1 else ''}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
