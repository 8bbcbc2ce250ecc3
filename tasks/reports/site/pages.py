"""The site: `<paper>/<table>.html`, `.json` and `.md` for each table, and `index.html`. Equal results give equal bytes.

Everything a template prints is escaped. A page embeds its style, scripts and pictures, and its policy forbids loading anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from dml_core.evaluation.columns import recall_k
from tasks.environment import Project, shown
from tasks.files import write_whole
from tasks.locks import alone
from tasks.plans.results import load_result
from tasks.reports.site import glyphs
from tasks.reports.site.details import line_details
from tasks.reports.site.pictures import diagram_picture
from tasks.reports.site.waiting import waits
from tasks.runs.specs import Params, run_label, table_comparison
from tasks.storage import Store, open_store
from tasks.tables.counts import Counted
from tasks.tables.file import PROJECT, load_table, table_names
from tasks.tables.present import table_today
from tasks.tables.report import as_markdown, as_note
from tasks.tables.view import EPOCH_NOTES, ShownLine, ShownRow, ShownTable, comparable, shown_table
from tasks.tracking.published import published_runs

SITE = Path("results") / "site"  # in the project
SITE_LOCK = ".site.lock"  # in the state folder
INDEX = "index.html"
PAPERS = {
    "discriminative": "Discriminative loss",
    "heated_up_softmax": "Heated-up softmax",
    "sgsl": "SGSL",
    "softtriple": "SoftTriple",
    "tuplet_margin": "Tuplet margin",
}
METRICS = {"nmi": "NMI", "nmi_geometric": "NMI (geometric)", "ami": "AMI", "f1": "F1", "map@r": "MAP@R", "csc": "CSC"}
VERDICTS = {"compatible": ("=", "compatible"), "above": ("▲", "above"), "below": ("▼", "below"), "undecided": ("?", "undecided")}
CLAIMS = {"holds": "✓", "refuted": "✗", "not shown": "≈", "not decided": "?"}
Links = Mapping[tuple[str, str, int], str]


@dataclass(frozen=True)
class TablePage:
    """The files written for a table.

    Attributes:
        markdown: the table as text.
        note: description and results, in a few lines of Markdown.
        html, json, text: paths of the files.
    """

    markdown: str
    note: str
    html: Path
    json: Path
    text: Path

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all files, for MLflow."""
        return str(self.html), str(self.json), str(self.text)


def write_site(project: Project, params: Params, names: Sequence[str], folder: Path | None = None) -> list[TablePage]:
    """Write the pages of these tables, and the index of all tables.

    Args:
        project: project whose results and store are read.
        params: parameters of the project.
        names: tables, `<paper>/<file>`.
        folder: output folder; by default the project's `results/site`.
    """
    folder = folder or project.root / SITE
    store = open_store(project)
    pages = []
    for name in names:
        with alone(project.state / SITE_LOCK):  # another process may have a newer result of the same table
            pages.append(_write_table(project, params, name, store, folder))
    with alone(project.state / SITE_LOCK):
        write_whole(folder / INDEX, index_page(folder))
    return pages


def _write_table(project: Project, params: Params, name: str, store: Store, folder: Path) -> TablePage:
    table, measured = load_table(name), load_result(project, name)
    today = table_today(project, params, name, table, measured)
    result, _ = comparable(measured, today)
    shown = shown_table(name, table, measured, waits(project, params, name, table, result), today)
    html = (
        environment()
        .get_template("table.html")
        .render(
            table=shown,
            details=line_details(name, table, result, store),
            links=_links(project, shown),
            diagram=None if shown.ranking is None else diagram_picture(shown.ranking),
            scales=[glyphs.column_scale(shown, index) for index in range(len(shown.columns))],
            json_name=f"{name.rpartition('/')[2]}.json",
        )
    )
    path = folder / name
    page = TablePage(as_markdown(shown), as_note(shown), *(path.with_name(f"{path.name}{suffix}") for suffix in (".html", ".json", ".md")))
    write_whole(page.html, html)
    write_whole(page.json, shown.model_dump_json(indent=1) + "\n")
    write_whole(page.text, page.markdown)
    return page


def index_page(folder: Path) -> str:
    """Return the HTML index of a folder's pages, read from their JSON; tables without a page are listed with the command that writes it."""
    papers: dict[str, list[tuple[str, str, ShownTable | None, bool]]] = {}
    for name in table_names():
        entry = name, load_table(name).title, _written(folder, name), (folder / f"{name}.html").is_file()
        papers.setdefault(name.partition("/")[0], []).append(entry)
    return environment().get_template("index.html").render(papers=papers, totals=_totals(papers), project=PROJECT)


def _written(folder: Path, name: str) -> ShownTable | None:
    """Return a table as its page in the folder shows it, or None if it has no page or one written by another version."""
    try:
        return ShownTable.model_validate_json((folder / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        return None


def _links(project: Project, table: ShownTable) -> dict[tuple[str, str, int], str]:
    """Return (project's dataset, label, seed) -> the run's page in MLflow; empty without an MLflow server that answers."""
    from dml_core.errors import TrackingError

    if not project.tracking_uri.startswith("http"):
        return {}
    found: dict[tuple[str, str, int], str] = {}
    for dataset in sorted({run.project_dataset for row in table.rows for line in row.lines for run in line.runs}):
        try:
            runs = published_runs(project.tracking_uri, dataset, table_comparison(table.name, dataset))
        except TrackingError:
            continue  # it has none of them, or is down: the page still names the runs
        found |= {(dataset, run.variant, run.seed): f"{shown(project.tracking_uri).rstrip('/')}/#/runs/{run.run_id}" for run in runs}
    return found


# ---------------------------------------------------------------- what templates use


@cache
def environment() -> Environment:
    """Return the renderer of the pages: everything printed is escaped, and an undefined name is an error."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader("tasks.reports.site"), PackageLoader("tasks")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {
        "verdicts": VERDICTS,
        "claim_marks": CLAIMS,
        "epoch_notes": EPOCH_NOTES,
        "draw": glyphs.draw,
        "glyph_size": (glyphs.WIDTH, glyphs.HEIGHT),
        "printed_key": _printed_key,
        "measured_key": _measured_key,
        "link_of": _link_of,
        "verdict_counts": _verdict_counts,
        "blocks": _blocks,
        "is_figure": _is_figure,
    }
    made.filters |= {"metric": metric_title, "paper": paper_title, "stem": table_title, "figure": _figure}
    return made


def metric_title(name: str) -> str:
    """Return the display name of a metric."""
    k = recall_k(name)
    return f"R@{k}" if k is not None else METRICS.get(name, name.replace("_", " "))


def paper_title(folder: str) -> str:
    """Return the display name of a paper, given its folder."""
    return PAPERS.get(folder, folder.replace("_", " ").capitalize())


def table_title(name: str) -> str:
    """Return the display name of a table: `softtriple/table1` becomes "Table 1"."""
    stem = name.rpartition("/")[2]
    kind = stem.rstrip("0123456789")
    return f"{kind} {stem.removeprefix(kind)}".replace("_", " ").strip().capitalize()


def _figure(decimals: int, value: float) -> str:
    return f"{value:.{decimals}f}"


def _printed_key(row: ShownRow) -> str:
    """Return the sort key of the page's script: one published figure per column, "-" if missing."""
    return " ".join("-" if value is None else f"{value:g}" for value in row.published)


def _measured_key(row: ShownRow) -> str:
    """Return the same key for measured figures, each from the first line in which the column was measured."""
    means = [next((line.cells[index] for line in row.lines if line.cells[index] is not None), None) for index in range(len(row.published))]
    return " ".join("-" if cell is None else f"{cell.mean:.6g}" for cell in means)


def _blocks(table: ShownTable) -> list[tuple[str, int, str | None]]:
    """Return (dataset, number of columns, the paper's dataset that it replaces) of neighbouring columns of one dataset."""
    found = groupby(table.columns, lambda column: (column.dataset, column.stands_in_for))
    return [(dataset, len(list(columns)), stands_in_for) for (dataset, stands_in_for), columns in found]


def _link_of(links: Links, row: ShownRow, line: ShownLine, dataset: str, seed: int) -> str | None:
    return links.get((dataset, run_label(row.name, line.variant, line.epoch), seed))


def _is_figure(table: ShownTable) -> bool:
    """Return whether the table is a figure: its rows' own pictures then appear on the page itself, not in an opened row."""
    return table.name.rpartition("/")[2].startswith("figure")


def _verdict_counts(found: Counted) -> list[tuple[str, int]]:
    """Return (verdict, number of cells) in the order of the legend."""
    return [(verdict, found.verdicts[verdict]) for verdict in VERDICTS if verdict in found.verdicts]


def _totals(papers: Mapping[str, Sequence[tuple[str, str, ShownTable | None, bool]]]) -> dict[str, tuple[int, int]]:
    """Return paper -> number of its tables measured on their own data, and number measured on stand-ins."""
    shown = {paper: [table for _, _, table, _ in tables if table is not None] for paper, tables in papers.items()}
    return {paper: (sum(t.own_data.rows > 0 for t in tables), sum(t.stand_in.rows > 0 for t in tables)) for paper, tables in shown.items()}
