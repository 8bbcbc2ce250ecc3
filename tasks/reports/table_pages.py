"""Pages of tables: `<paper>/<table>.html`, `.json` and `.md` for each table, and `index.html`. Equal results give equal bytes.

A page is one file with its style, scripts and pictures; its policy forbids loading anything.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Literal

from dml_core.data.registry import published_dataset
from dml_core.errors import ConfigError, DataError, TrackingError
from tasks.checks import check_before
from tasks.environment import Project, shown
from tasks.files import write_whole
from tasks.locks import alone
from tasks.plans.prices import Prices
from tasks.plans.results import load_result
from tasks.reports.kit import render
from tasks.reports.pictures import PictureCache, diagram_picture
from tasks.reports.table_costs import cost_rows
from tasks.reports.table_details import Details, line_details
from tasks.reports.table_text import as_markdown, as_note
from tasks.runs.specs import Params, RunSpec
from tasks.runs.tuned import STANDING
from tasks.storage import Store, open_store
from tasks.tables.alarms import Alarm, open_alarms
from tasks.tables.file import PROJECT, TableFile, load_table, paper_tables, table_names
from tasks.tables.present import table_today
from tasks.tables.result import TableResult
from tasks.tables.runs import named_dataset, not_in_params, row_training, scoring_of
from tasks.tables.shown import ShownCell, ShownColumn, ShownTable
from tasks.tables.view import comparable, shown_table, unmeasured
from tasks.tracking.child_run import run_link
from tasks.tracking.published import published_runs

SITE = Path("results") / "site"  # in the project
SITE_LOCK, PICTURES = ".site.lock", "pictures"  # in the state folder
INDEX, INDEX_TITLE = "index.html", b"<title>Tables and figures of the papers</title>"
HISTORY = "verification.html"  # written by `tasks.watch.history`
WIDTH, HEIGHT, MARGIN = 120.0, 18.0, 5.0  # pixels of a cell's drawing
SPAN = 2.5  # half of the minimum span of a drawing, in tolerances


@dataclass(frozen=True)
class TablePage:
    """The files written for a table.

    Attributes:
        markdown: the table as text.
        note: description and results, in a few lines of Markdown.
        html: path of the page.
    """

    markdown: str
    note: str
    html: Path

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """Paths of the page, its JSON and its Markdown."""
        return self.html, self.html.with_suffix(".json"), self.html.with_suffix(".md")


def write_site(
    project: Project, params: Params, names: Sequence[str], folder: Path | None = None, prices: Prices | None = None
) -> list[TablePage]:
    """Write the pages of these tables (`<paper>/<file>`), and the index of all tables; `prices` turn costs into money.

    The folder is by default the project's `results/site`.

    Raises:
        ConfigError: the named folder has other files of these names, or an index of something else.
    """
    lock = project.state / SITE_LOCK
    if folder is not None:
        with alone(lock):
            _claim(folder, names)
    folder = folder or project.root / SITE
    store = open_store(project)
    pages = []
    for name in names:
        with alone(lock):  # another process may have a newer result of the same table
            pages.append(_write_table(project, params, name, store, folder, prices))
    with alone(lock):
        write_whole(folder / INDEX, index_page(folder, open_alarms(project.state)))
    return pages


def _claim(folder: Path, names: Sequence[str]) -> None:
    """Check that a folder has an index of tables, or nothing that the pages of these tables would replace, and write an index first.

    So the pages of an interrupted command are replaced by the next.
    """
    if (folder / INDEX).is_file():
        if INDEX_TITLE not in (folder / INDEX).read_bytes():
            raise ConfigError(f"{folder / INDEX}: is not an index of tables; choose another folder with -o")
        return
    for path in (folder / f"{name}{suffix}" for name in names for suffix in (".html", ".json", ".md")):
        if path.exists():
            raise ConfigError(f"{path}: exists already, and {folder} has no index of tables; choose another folder with -o")
    write_whole(folder / INDEX, index_page(folder))


def _write_table(project: Project, params: Params, name: str, store: Store, folder: Path, prices: Prices | None) -> TablePage:
    file, measured = load_table(name), load_result(project, name)
    today = table_today(project, params, name, file, measured)
    result, _ = comparable(measured, today)
    table = shown_table(name, file, measured, _waiting(project, params, name, file, result), today)
    page = TablePage(as_markdown(table), as_note(table), folder / f"{name}.html")
    pictures = PictureCache(project.state / PICTURES / f"{name}.json")
    details = line_details(params, name, file, result, store, pictures)
    columns = [table.columns[index] for index in table.order]
    html = render(
        "table.html",
        table=table,
        blocks=[
            (*block, len(list(of_block))) for block, of_block in groupby(columns, lambda column: (column.dataset, column.stands_in_for))
        ],
        details=details,
        links=_links(project, details.values()),
        diagram=None if table.ranking is None else diagram_picture(table.ranking, pictures),
        scales=[column_scale(table, index) for index in range(len(table.columns))],
        scale_of=cell_scale,
        describe=describe_cell,
        glyph_size=(WIDTH, HEIGHT),
        json_name=page.files[1].name,
        costs=cost_rows(file, result, prices),
    )
    pictures.save()
    for path, text in zip(page.files, (html, table.model_dump_json(indent=1) + "\n", page.markdown), strict=True):
        write_whole(path, text)
    return page


@dataclass(frozen=True)
class IndexEntry:
    """A table in the index.

    Attributes:
        name, title: as in the tables' folder and in the table's file.
        table: content of its page; None without a page, or if another version wrote it.
        has_page: whether there is a page to link to.
        needs: datasets of the paper that the user provides (`dml data add`).
    """

    name: str
    title: str
    table: ShownTable | None
    has_page: bool
    needs: tuple[str, ...]

    @property
    def paper(self) -> str:
        """Folder of the paper, or of the project's own tables."""
        return self.name.partition("/")[0]

    @property
    def measured_on(self) -> Literal["own data", "stand-in", "nothing"]:
        """Data with measurements: the paper's own, or stand-ins only."""
        if self.table is not None and self.table.own_data.rows:
            return "own data"
        return "stand-in" if self.table is not None and self.table.stand_in.rows else "nothing"


def index_page(folder: Path, alarms: Sequence[Alarm] = ()) -> str:
    """Return the HTML index of a folder's pages, read from their JSON: what is measured first, the other tables folded with their needs.

    Alarms of the verification are above both.
    """
    entries = []
    for name in table_names():
        table, has_page = load_table(name), (folder / f"{name}.html").is_file()
        needs = tuple(dataset for dataset in table.datasets if published_dataset(dataset) and dataset not in table.stand_ins)
        entries.append(IndexEntry(name, table.title, _written(folder, name), has_page, needs))
    measured = [entry for entry in entries if entry.measured_on != "nothing"]
    of_papers = [entry for entry in measured if entry.paper != PROJECT]
    waiting = [entry for entry in entries if entry.measured_on == "nothing" and entry.name != STANDING]  # whose results are elsewhere, too
    return render(
        "index.html",
        own_data=[entry for entry in of_papers if entry.measured_on == "own data"],
        stand_in=[entry for entry in of_papers if entry.measured_on == "stand-in"],
        of_project=[entry for entry in measured if entry.paper == PROJECT],
        waiting={paper: list(of_paper) for paper, of_paper in groupby(waiting, attrgetter("paper"))},
        needs=Counter(dataset for entry in waiting for dataset in entry.needs).most_common(),
        num_tables=len(paper_tables()),
        alarms=alarms,
        history=HISTORY if (folder / HISTORY).is_file() else None,
    )


def _written(folder: Path, name: str) -> ShownTable | None:
    """Return a table as its page in the folder shows it, or None if it has no page or one written by another version."""
    try:
        return ShownTable.model_validate_json((folder / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        return None


def _waiting(project: Project, params: Params, name: str, table: TableFile, result: TableResult) -> dict[tuple[str, str], str]:
    """Return (row, dataset) -> what is missing, as one line; rows that only have to be run are omitted."""
    missing: dict[tuple[str, str], str] = {}
    if name == STANDING:
        return missing  # its variants need nothing else than its datasets
    for key, row in table.rows.items():
        for dataset in unmeasured(table, key, result) if row.is_run else ():
            try:
                options = table.dataset_options(dataset)
                prepared = named_dataset(params, dataset, options)
                if prepared is None:
                    raise ConfigError(not_in_params({dataset: options}))
                training, evaluation = row_training(name, row, dataset), scoring_of(name, table, dataset)
                spec = RunSpec(dataset=prepared, variant=row.variants[0], seed=0, training=training, evaluation=evaluation, table=name)
                check_before(project, params, [spec])
            except (ConfigError, DataError) as error:
                missing[key, dataset] = str(error)
    return missing


def _links(project: Project, lines: Iterable[Sequence[Details]]) -> Mapping[tuple[str, str, int], str]:
    """Return (comparison, label, seed) -> the run's page in MLflow; empty without an MLflow server that answers."""
    if not project.tracking_uri.startswith("http"):
        return {}
    links: dict[tuple[str, str, int], str] = {}
    for dataset, comparison in sorted({(details.run.project_dataset, details.comparison) for line in lines for details in line}):
        try:
            runs = published_runs(project.tracking_uri, dataset, comparison)
        except TrackingError:
            continue  # it has none of them, or is down: the page still names the runs
        server = shown(project.tracking_uri).rstrip("/")
        links |= {(comparison, run.variant, run.seed): f"{server}/{run_link(run.experiment_id, run.run_id)}" for run in runs}
    return links


# ---------------------------------------------------------------- drawings of measured values


@dataclass(frozen=True)
class Scale:
    """Values at the left and the right end of a cell's drawing."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Return the position of a value in pixels from the left of WIDTH, clipped to the ends."""
        share = (value - self.low) / (self.high - self.low)
        return round(MARGIN + min(max(share, 0.0), 1.0) * (WIDTH - 2 * MARGIN), 2)


def column_scale(table: ShownTable, index: int) -> Scale:
    """Return a scale that covers all measured values and intervals of a column."""
    cells = [cell for row in table.rows for line in row.lines if (cell := line.cells[index]) is not None]
    values = [value for cell in cells for value in (*cell.interval, *cell.values.values())]
    if not values or min(values) == max(values):
        middle = values[0] if values else 0.0
        return Scale(middle - 1, middle + 1)
    spare = 0.05 * (max(values) - min(values))
    return Scale(min(values) - spare, max(values) + spare)


def cell_scale(cell: ShownCell, published: float | None, shared: Scale) -> Scale:
    """Return the scale of a cell's drawing: centred on the published value, or the column's (`shared`) if there is none."""
    if published is None:
        return shared
    predicted = [end for end in (cell.low, cell.high) if end is not None]
    farthest = max(abs(value - published) for value in (*cell.interval, *predicted, *cell.values.values()))
    half = max(1.1 * farthest, SPAN * (cell.tolerance or 0.0)) or 1.0
    return Scale(published - half, published + half)


def describe_cell(cell: ShownCell, column: ShownColumn, published: float | None) -> str:
    """Return what a cell's drawing shows, in words."""
    parts = [f"mean {column.measured(cell.mean)}"]
    if cell.half_width is not None:
        parts.append(f"95 % interval {' to '.join(map(column.measured, cell.interval))}")
    if published is not None:
        parts.append(f"published {column.printed(published)}")
    if cell.low is not None and cell.high is not None:
        parts.append(f"prediction interval of one run {column.measured(cell.low)} to {column.measured(cell.high)}")
    return "; ".join([*parts, ", ".join(f"seed {seed}: {column.measured(value)}" for seed, value in cell.values.items())])
