"""Tables on the terminal, with whole names: columns that do not fit are omitted by importance, and a line below the table names them."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich import table as rich
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from dml_core.errors import printable
from flows.cli.session import print_lines

PROSE_WIDTH = 20  # characters to which a column of prose shrinks before another column is omitted
NARROW_PROSE_WIDTH = 10  # characters to which it shrinks before other values fold
FRAME_WIDTH = 3  # of each column; the table has one character more
_BAR = re.compile(r"(?<!\\)\|")  # between cells of a Markdown table; `tasks.reports.kit.markdown_table` escapes those in a cell


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a printed table.

    Attributes:
        title: heading; wraps at spaces.
        values: a text for each row; strings are printed literally, without markup and control characters.
        drop: order in which columns are omitted on a narrow terminal, 1 first; None: never.
        wraps: values may wrap, as prose and paths do. Other values stay on one line, unless the columns that are never omitted are together
            wider than the terminal.
        style: style of the title and the values, as rich names it.
    """

    title: str
    values: Sequence[str | Text]
    drop: int | None = None
    wraps: bool = False
    style: str = ""

    @property
    def full_width(self) -> int:
        """Width in characters with the title and each line of a value on one line."""
        return max(cell_len(self.title), self._value_width)

    @property
    def least_width(self) -> int:
        """Width in characters below which a value that must not wrap, or a word of the title, would be broken."""
        title = max((cell_len(word) for word in self.title.split()), default=0)
        return max(title, min(self._value_width, PROSE_WIDTH) if self.wraps else self._value_width)

    @property
    def _value_width(self) -> int:
        return max((cell_len(line) for value in self.values for line in str(value).split("\n")), default=0)


def print_table(*columns: Column, title: str | None = None) -> None:
    """Print a table fitted to the terminal, or in a pipe at its full width."""
    columns = tuple(replace(column, values=list(map(_literal, column.values))) for column in columns)
    width = terminal_width()
    shown, widths = (columns, [column.full_width for column in columns]) if width is None else _fit(columns, width)
    table = rich.Table(title=None if title is None else Text(printable(title), "table.title"))
    for column, column_width in zip(shown, widths, strict=True):
        table.add_column(
            Text(column.title), width=column_width, overflow="fold", style=column.style, header_style=f"bold {column.style}".rstrip()
        )
    for row in zip(*(column.values for column in shown), strict=True):
        table.add_row(*row)
    console = Console(width=width or sum(widths) + FRAME_WIDTH * len(widths) + 1)
    with console.capture() as text:  # rich itself ends the process with 1 if the reader of a pipe has closed it
        console.print(table)
        if omitted := [column.title for column in columns if column not in shown]:
            console.print(Text(f"Omitted at a width of {width}: {', '.join(omitted)}.\nA wider terminal or `| less -S` shows them."))
    sys.stdout.write(text.get())


def _literal(value: str | Text) -> Text:
    """Return a value, of one line or more, with its control characters escaped: names of files and classes may have any."""
    text = Text(value) if isinstance(value, str) else value.copy()
    text.plain = "\n".join(map(printable, str(value).split("\n")))
    return text


def print_page(page: str) -> None:
    """Print a Markdown page; on a terminal its tables are fitted to the width."""
    if terminal_width() is None:
        print_lines(*page.split("\n"))
        return
    for is_table, lines in groupby(page.splitlines(), key=lambda line: line.startswith("|")):
        if is_table:
            header, _, *rows = ([cell.strip().replace(r"\|", "|") for cell in _BAR.split(line.strip("|"))] for line in lines)
            _print_markdown_table(header, rows)
        else:
            print_lines(*lines)
    print()


def _print_markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a page's table; names, the first metric and differences are never omitted, of the others the last is omitted first."""
    num_kept = 3 if "values" in header[1:2] else 2
    columns = []
    for place, title in enumerate(header):
        drop = None if place < num_kept or title.startswith("difference") else len(header) - place
        columns.append(Column(title, [_bold(row[place]) for row in rows], drop, wraps=True))
    print_table(*columns)


def _bold(cell: str) -> Text:
    """Return a cell of a Markdown table, which may begin with bold text."""
    bold = re.match(r"\*\*(.+?)\*\*", cell)
    return Text(cell) if bold is None else Text.assemble((bold[1], "bold"), cell[bold.end() :])


def terminal_width() -> int | None:
    """Return the number of characters in a line of the terminal, or None if standard output is not a terminal."""
    return Console().width if sys.stdout.isatty() else None


def _fit(columns: Sequence[Column], width: int) -> tuple[list[Column], list[int]]:
    """Return the columns that are shown in a width, and the width of each."""
    shown = list(columns)
    while sum(column.least_width + FRAME_WIDTH for column in shown) + 1 > width:
        droppable = {column.drop: column for column in shown if column.drop is not None}
        if not droppable:
            break
        shown.remove(droppable[min(droppable)])
    widths = [column.least_width for column in shown]
    spare = width - 1 - sum(widths) - FRAME_WIDTH * len(widths)
    while spare < 0 and max(widths) > 1:
        prose = [at for at, column in enumerate(shown) if column.wraps and widths[at] > NARROW_PROSE_WIDTH]
        widths[max(prose or range(len(widths)), key=widths.__getitem__)] -= 1
        spare += 1
    while spare > 0 and (narrow := [at for at, column in enumerate(shown) if widths[at] < column.full_width]):
        widths[min(narrow, key=widths.__getitem__)] += 1
        spare -= 1
    return shown, widths
