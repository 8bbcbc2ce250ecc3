"""Compare and rank the measured lines of a table, by the first metric of each dataset for which higher is better.

Each line (a row in a variant, at an epoch) is one system. The statistics are in `dml_core.evaluation.statistics.comparing`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from dml_core.evaluation.metric_info import metric_info
from dml_core.evaluation.statistics.comparing import Comparison, Scores, compare
from dml_core.evaluation.statistics.mean_ranks import Ranking, rank_systems

POINTS = {"per cent": 1.0, "share": 0.01}  # one percentage point in the column's unit


class MetricColumn(Protocol):
    """A column of a table's file or of a shown table."""

    @property
    def dataset(self) -> str:
        """Name of the dataset in the table."""

    @property
    def metric(self) -> str:
        """Name of the metric in the evaluator."""


class ComparedColumn(MetricColumn, Protocol):
    """A column of a shown table."""

    @property
    def unit(self) -> str:
        """Unit of the values."""

    @property
    def decimals(self) -> int:
        """Number of decimals of measured values."""


class ComparedCell(Protocol):
    """A cell of a shown table."""

    @property
    def values(self) -> Mapping[int, float]:
        """Values by seed."""

    @property
    def num_queries(self) -> int | None:
        """Number of queries behind the values; None if unknown."""

    @property
    def num_classes(self) -> int | None:
        """Number of classes behind the values; None if unknown."""


class ComparedLine(Protocol):
    """A line of a shown table."""

    @property
    def system(self) -> str:
        """Name of the line, unique in the table."""

    @property
    def cells(self) -> Sequence[ComparedCell | None]:
        """One cell per column."""


def compared_columns(columns: Sequence[MetricColumn]) -> dict[str, int]:
    """Return, for each dataset, the index of its first column whose metric is better when higher."""
    found: dict[str, int] = {}
    for index, column in enumerate(columns):
        if metric_info(column.metric).higher_is_better:
            found.setdefault(column.dataset, index)
    return found


def compare_lines(columns: Sequence[ComparedColumn], lines: Sequence[ComparedLine], reference: str | None) -> tuple[Comparison, ...]:
    """Compare the lines on each dataset on which two of them share enough seeds.

    Args:
        columns, lines: of the table.
        reference: system that the table's file names as reference.
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
    """Rank the lines over the datasets that share a metric, or over the seeds of the only measured dataset; otherwise return None."""
    scores = {index: _scores(lines, index) for index in compared_columns(columns).values()}
    measured = {index: found for index, found in scores.items() if found}
    metrics = [columns[index].metric for index in measured]
    metric = next((metric for metric in metrics if len(measured) == 1 or metrics.count(metric) > 1), None)
    if metric is None:
        return None
    return rank_systems(metric, {columns[index].dataset: found for index, found in measured.items() if columns[index].metric == metric})


def _scores(lines: Sequence[ComparedLine], column: int) -> Scores:
    return {line.system: cell.values for line in lines if (cell := line.cells[column]) is not None}
