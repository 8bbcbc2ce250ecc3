"""The metric by which a table's shown lines are compared, in the unit of its columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from tasks.tables.judging import compare_lines, compared_columns, rank_lines


@dataclass
class Column:
    dataset: str
    metric: str
    unit: str = "per cent"
    decimals: int = 1


@dataclass
class Cell:
    values: Mapping[int, float]
    num_queries: int | None = None
    num_classes: int | None = None


@dataclass
class Line:
    system: str
    cells: Sequence[Cell | None]


def lines(**values: Sequence[Sequence[float] | None]) -> list[Line]:
    return [Line(system, [None if cell is None else Cell(dict(enumerate(cell))) for cell in cells]) for system, cells in values.items()]


def test_a_dataset_is_compared_by_its_first_metric_that_has_a_best() -> None:
    columns = [Column("a", "num_images"), Column("a", "recall@1"), Column("a", "nmi"), Column("b", "nmi")]
    assert compared_columns(columns) == {"a": 1, "b": 3}


@pytest.mark.parametrize(("unit", "points"), [("per cent", 1.0), ("share", 0.01), ("minutes", None)])
def test_the_difference_that_seeds_are_asked_for_is_one_point_in_the_column_s_unit(unit: str, points: float | None) -> None:
    (found,) = compare_lines([Column("a", "recall@1", unit)], lines(x=[(0.5, 0.6, 0.7)], y=[(0.4, 0.45, 0.6)]), "y")
    assert (found.points, found.reference, found.dataset, found.metric) == (points, "y", "a", "recall@1")
    assert found.means == {"x": pytest.approx(0.6), "y": pytest.approx(0.4833, abs=1e-4)}


def test_lines_without_three_shared_seeds_are_not_compared() -> None:
    columns = [Column("a", "recall@1"), Column("b", "recall@1")]
    shown = lines(x=[(50.0, 60.0, 61.0), (50.0, 55.0, 56.0)], y=[(40.0, 41.0), (40.0, 44.0, 45.0)], z=[None, None])
    assert [found.dataset for found in compare_lines(columns, shown, None)] == ["b"]


def test_ranks_are_over_the_datasets_of_the_first_metric_that_several_have() -> None:
    columns = [Column("a", "nmi"), Column("b", "recall@1"), Column("c", "recall@1"), Column("d", "recall@1")]
    shown = lines(
        x=[(1.0, 2.0, 3.0), (50.0, 51.0), (50.0, 52.0), None],
        y=[(2.0, 3.0, 4.0), (40.0, 42.0), (40.0, 43.0), None],
        z=[(3.0, 4.0, 5.0), (30.0, 32.0), (30.0, 33.0), None],
    )
    ranks = rank_lines(columns, shown)
    assert ranks is not None
    assert (ranks.metric, ranks.over, ranks.blocks) == ("recall@1", "datasets", ("b", "c"))
    assert ranks.mean_ranks == {"x": 1.0, "y": 2.0, "z": 3.0}
    one = rank_lines(columns[:1], shown)
    assert one is not None
    assert (one.metric, one.over, one.mean_ranks) == ("nmi", "seeds", {"z": 1.0, "y": 2.0, "x": 3.0})
    assert rank_lines(columns[:2], lines(x=[None, None])) is None
    assert rank_lines(columns[:2], shown) is None, "two datasets with different metrics"
