"""Helpers of all reports: templates, names of metrics and tables, Markdown tables."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from dml_core.evaluation.metric_info import metric_info
from tasks.tables.shown import EPOCH_NOTES

PAPERS = {
    "discriminative": "Discriminative loss",
    "heated_up_softmax": "Heated-up softmax",
    "sgsl": "SGSL",
    "softtriple": "SoftTriple",
}
VERDICT_MARKS = {"compatible": "=", "above": "▲", "below": "▼", "undecided": "?"}
CLAIM_MARKS = {"holds": "✓", "refuted": "✗", "not shown": "≈", "not decided": "?"}


def render(template: str, **values: Any) -> str:
    """Return a page or a Markdown text, with one newline at its end. HTML is escaped, and an undefined name is an error."""
    return _environment().get_template(template).render(**values).rstrip() + "\n"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("tasks.reports"), PackageLoader("tasks")]),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "verdict_marks": VERDICT_MARKS,
        "claim_marks": CLAIM_MARKS,
        "epoch_notes": EPOCH_NOTES,
    }
    environment.filters |= {
        "metric": lambda name: metric_info(name).title,
        "paper": paper_title,
        "stem": table_title,
        "count": lambda number: f"{number:,}",
        "code": inline_code,
        "markdown_table": markdown_table,
    }
    return environment


def paper_title(folder: str) -> str:
    """Return the display name of a paper, given its folder."""
    return PAPERS.get(folder, folder.replace("_", " ").capitalize())


def table_title(name: str) -> str:
    """Return the display name of a table: `softtriple/table1` becomes "Table 1"."""
    stem = name.rpartition("/")[2]
    kind = stem.rstrip("0123456789")
    return f"{kind} {stem.removeprefix(kind)}".replace("_", " ").strip().capitalize()


def inline_code(text: str) -> Markup:
    """Return prose as HTML: what is between backticks is a `code` element, all else is escaped."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its first row as header, whose columns are padded to their widest cell."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    return "\n".join([padded[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *padded[1:]])
