"""The measured lines of a table beside each other: which are better than which, by the first metric of each dataset that has a best.

Every line (a row in a variant, an epoch) is a system of its own. The statistics are `dml_core.evaluation.comparing`'s.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from dml_core.evaluation.comparing import Comparison, Scores, compare, has_best
from dml_core.evaluation.mean_ranks import Ranking, rank_systems

POINTS = {"per cent": 1.0, "share": 0.01}  # one per cent point in the column's unit


class MetricColumn(Protocol):
    """A column of a table's file, or as it is shown."""

    @property
    def dataset(self) -> str:
        """As the table names it."""

    @property
    def metric(self) -> str:
        """As the evaluator names it."""


class ComparedColumn(MetricColumn, Protocol):
    """A column as it is shown."""

    @property
    def unit(self) -> str:
        """Of the values."""

    @property
    def decimals(self) -> int:
        """Of measured figures."""


class ComparedCell(Protocol):
    """A cell as it is shown."""

    @property
    def values(self) -> Mapping[int, float]:
        """By seed."""

    @property
    def num_queries(self) -> int | None:
        """That the values are of, where it is known."""

    @property
    def num_classes(self) -> int | None:
        """The same of classes."""


class ComparedLine(Protocol):
    """A line as it is shown."""

    @property
    def system(self) -> str:
        """A name that no other line has."""

    @property
    def cells(self) -> Sequence[ComparedCell | None]:
        """One for each column."""


def compared_columns(columns: Sequence[MetricColumn]) -> dict[str, int]:
    """Dataset -> its first column whose metric has a best."""
    found: dict[str, int] = {}
    for index, column in enumerate(columns):
        if has_best(column.metric):
            found.setdefault(column.dataset, index)
    return found


def compare_lines(columns: Sequence[ComparedColumn], lines: Sequence[ComparedLine], reference: str | None) -> tuple[Comparison, ...]:
    """A comparison for each dataset on which two lines share enough seeds.

    Args:
        columns, lines: of the table.
        reference: the system that its file names.
    """
    found = []
    for dataset, index in compared_columns(columns).items():
        column = columns[index]
        cells = [cell for line in lines if (cell := line.cells[index]) is not None]
        made = compare(
            dataset,
            column.metric,
            _scores(lines, index),
            reference,
            POINTS.get(column.unit),
            column.decimals,
            min((cell.num_queries for cell in cells if cell.num_queries is not None), default=None),
            min((cell.num_classes for cell in cells if cell.num_classes is not None), default=None),
        )
        if made is not None and made.to_best:
            found.append(made)
    return tuple(found)


def rank_lines(columns: Sequence[ComparedColumn], lines: Sequence[ComparedLine]) -> Ranking | None:
    """Ranks over the measured datasets of the first metric that several have; where one alone was measured over its seeds; else None."""
    scores = {index: _scores(lines, index) for index in compared_columns(columns).values()}
    measured = {index: found for index, found in scores.items() if found}
    metrics = [columns[index].metric for index in measured]
    metric = next((metric for metric in metrics if len(measured) == 1 or metrics.count(metric) > 1), None)
    if metric is None:
        return None
    return rank_systems(metric, {columns[index].dataset: found for index, found in measured.items() if columns[index].metric == metric})


def _scores(lines: Sequence[ComparedLine], column: int) -> Scores:
    return {line.system: cell.values for line in lines if (cell := line.cells[column]) is not None}
