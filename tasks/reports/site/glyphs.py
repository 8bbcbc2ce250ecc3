"""One-line drawings for measured figures: published figure, prediction interval of one run, mean with 95 % interval, seeds.

A cell with a published figure is centred on it; without one, the measured values of the column share a scale. The template draws.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tasks.tables.view import ShownCell, ShownColumn, ShownTable

WIDTH, HEIGHT, MARGIN = 120.0, 18.0, 5.0
SPAN = 2.5  # half of the minimum span of a drawing, in tolerances


@dataclass(frozen=True)
class Glyph:
    """Positions in pixels from the left of WIDTH; None if missing.

    Attributes:
        printed: the published figure; band: the prediction interval of one run.
        mean: mean of the seeds; interval: interval of the mean; seeds: each seed.
        says: the same in words.
    """

    printed: float | None
    band: tuple[float, float] | None
    mean: float
    interval: tuple[float, float] | None
    seeds: tuple[float, ...]
    says: str


@dataclass(frozen=True)
class Scale:
    """Values at the left and the right end of a drawing."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Return the position of a value, clipped to the ends."""
        share = (value - self.low) / (self.high - self.low)
        return round(MARGIN + min(max(share, 0.0), 1.0) * (WIDTH - 2 * MARGIN), 2)


def draw(cell: ShownCell, column: ShownColumn, printed: float | None, shared: Scale) -> Glyph:
    """Return a cell's drawing.

    Args:
        cell: the measured cell.
        column: column of the cell.
        printed: the published figure.
        shared: scale of the column, for a cell without a published figure.
    """
    low, high = _interval(cell)
    scale = shared
    if printed is not None:
        predicted = [end for end in (cell.low, cell.high) if end is not None]
        farthest = max(abs(value - printed) for value in (low, high, *predicted, *cell.values.values()))
        half = max(1.1 * farthest, SPAN * (cell.tolerance or 0.0)) or 1.0
        scale = Scale(printed - half, printed + half)
    band = None
    if cell.low is not None and cell.high is not None:
        band = scale.at(cell.low), scale.at(cell.high)
    return Glyph(
        printed=None if printed is None else scale.at(printed),
        band=band,
        mean=scale.at(cell.mean),
        interval=None if cell.half_width is None else (scale.at(low), scale.at(high)),
        seeds=tuple(scale.at(value) for value in cell.values.values()),
        says=_in_words(cell, column, printed),
    )


def column_scale(table: ShownTable, index: int) -> Scale:
    """Return a scale that covers all measured values and intervals of a column."""
    found: Iterable[ShownCell | None] = (line.cells[index] for row in table.rows for line in row.lines)
    values = [value for cell in found if cell is not None for value in (*_interval(cell), *cell.values.values())]
    if not values or min(values) == max(values):
        middle = values[0] if values else 0.0
        return Scale(middle - 1, middle + 1)
    spare = 0.05 * (max(values) - min(values))
    return Scale(min(values) - spare, max(values) + spare)


def _interval(cell: ShownCell) -> tuple[float, float]:
    half_width = cell.half_width or 0.0
    return cell.mean - half_width, cell.mean + half_width


def _in_words(cell: ShownCell, column: ShownColumn, printed: float | None) -> str:
    seeds = ", ".join(f"seed {seed}: {column.measured(value)}" for seed, value in cell.values.items())
    parts = [f"mean {column.measured(cell.mean)}"]
    if cell.half_width is not None:
        low, high = _interval(cell)
        parts.append(f"95 % interval {column.measured(low)} to {column.measured(high)}")
    if printed is not None:
        parts.append(f"printed {column.printed(printed)}")
    if cell.low is not None and cell.high is not None:
        parts.append(f"one run lies within {column.measured(cell.low)} to {column.measured(cell.high)}")
    return f"{'; '.join(parts)}; {seeds}"
