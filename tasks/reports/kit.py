"""Helpers of all reports: templates, names of metrics and tables, Markdown tables, and pictures small enough to be embedded in a page."""

import base64
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape
from PIL import Image

from dml_core.evaluation.metric_info import metric_info
from dml_core.evaluation.statistics.mean_ranks import Ranking
from dml_core.figures.mean_ranks import plot_mean_ranks
from tasks.runs.specs import run_label
from tasks.tables.shown import EPOCH_NOTES

FIGURES, MEASUREMENTS = "figures", "measurements"
CAPTIONS = {  # in their order on a page
    "curve": "loss over epochs",
    "gallery": "retrieval gallery",
    "similarities": "similarities of pairs",
    "map": "map of the embeddings",
}
PAGE_BYTES = 3_000_000  # of all pictures of a page, before base64 adds a third
LADDER = ((1400, 85), (1100, 80), (900, 75), (700, 65), (500, 50))  # (pixels, quality) to try, the best first
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".svg"}
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
        "run_label": run_label,
    }
    environment.filters |= {
        "metric": lambda name: metric_info(name).title,
        "paper": paper_title,
        "stem": table_title,
        "count": lambda number: f"{number:,}",
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


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its first row as header, whose columns are padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    return "\n".join([padded[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *padded[1:]])


# ---------------------------------------------------------------- pictures


@dataclass(frozen=True)
class Picture:
    """A picture in a page: `source` is a data URI, or None if there was no room or the file is not a picture."""

    caption: str
    file: str
    source: str | None
    width: int = 0
    height: int = 0

    @property
    def is_measurement(self) -> bool:
        """True if a measurement of the row drew it; a paper's figures are such pictures."""
        return self.file.startswith(f"{MEASUREMENTS}/")


def picture_files(folder: Path) -> list[Path]:
    """Return a finished run's pictures: the figures of every run, then those of its measurements."""
    known = list(CAPTIONS)
    figures, measurements = (
        sorted(path for path in (folder / part).rglob("*") if path.suffix.lower() in SUFFIXES) for part in (FIGURES, MEASUREMENTS)
    )
    return sorted(figures, key=lambda path: known.index(path.stem) if path.stem in known else len(known)) + measurements


def load_picture(path: Path, folder: Path, num_pictures: int) -> Picture:
    """Load a picture at the best size and quality that leaves room for all pictures of a page.

    Args:
        path: the picture.
        folder: folder of the run's scores; pictures are named relative to it.
        num_pictures: number of pictures on the whole page.
    """
    name, most_bytes = path.relative_to(folder).as_posix(), PAGE_BYTES // max(num_pictures, 1)
    caption = CAPTIONS.get(path.stem, path.stem.replace("_", " ").replace("-", " "))
    if path.suffix.lower() == ".svg":
        data = path.read_bytes()
        return Picture(caption, name, _data_uri("svg+xml", data) if len(data) <= most_bytes else None)
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, ValueError):
        return Picture(caption, name, None)
    for pixels, quality in LADDER:
        small, encoded = image.copy(), io.BytesIO()
        small.thumbnail((pixels, 2 * pixels))
        small.save(encoded, "WEBP", quality=quality, method=4)
        if encoded.tell() <= most_bytes:
            return Picture(caption, name, _data_uri("webp", encoded.getvalue()), *small.size)
    return Picture(caption, name, None)


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def diagram_picture(ranking: Ranking) -> Picture:
    """Return the critical-difference diagram of a table's systems, drawn again: it depends only on the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = plot_mean_ranks(ranking, Path(folder) / "ranks.png")
        return load_picture(path, Path(folder), 1)
