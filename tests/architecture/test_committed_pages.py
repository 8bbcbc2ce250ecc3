"""The pages in `docs/pages` match the committed results, the current table files and the current statistics.

A page's JSON is its record: the measured values of each seed and their conclusions. `dml report TABLE... -o docs/pages` writes all three
files of a page and the index; it needs the state and the store in which the tables were run.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dml_core.evaluation.statistics.over_seeds import summarise_seeds
from tasks.reports.table_pages import INDEX, index_page
from tasks.reports.table_text import as_markdown
from tasks.runs.tuned import STANDING
from tasks.sealed import read_sealed
from tasks.tables.file import load_table, table_names
from tasks.tables.judging import compare_lines, rank_lines
from tasks.tables.result import TableResult
from tasks.tables.runs import paper_protocol
from tasks.tables.shown import ShownTable
from tasks.tables.view import compared_lines, shown_table
from tests.conftest import ROOT
from tests.tasks.reports.conftest import read

PAGES = ROOT / "docs/pages"
NAMES = sorted(path.relative_to(PAGES).with_suffix("").as_posix() for path in PAGES.rglob("*.json"))
AGAIN = "stale: dml report {} -o docs/pages"


def page(name: str) -> ShownTable:
    return ShownTable.model_validate_json((PAGES / f"{name}.json").read_bytes())


def test_there_are_pages_and_each_is_whole() -> None:
    assert NAMES
    assert set(NAMES) <= set(table_names()) - {STANDING}, "the standing comparison is reported in results/ alone"
    expected = {INDEX} | {f"{name}{suffix}" for name in NAMES for suffix in (".html", ".json", ".md")}
    assert {path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*") if path.is_file()} == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_of_today_s_table_file(name: str) -> None:
    """Everything that does not depend on measured values."""
    now, then = shown_table(name, load_table(name), TableResult(name=name)), page(name)
    assert [row.name for row in then.rows] == [row.name for row in now.rows], AGAIN.format(name)
    for shown in (now, then):
        static = {"name", "title", "page", "states", "note", "tolerances", "rows", "columns", "claims"}
        rows = {"name", "label", "kind", "source", "note", "published", "released", "independent"}
        said = {"rows": {"__all__": rows}, "columns": {"__all__": {"dataset", "metric", "unit"}}, "claims": {"__all__": {"says"}}}
        fields: Any = {field: said.get(field, True) for field in static}
        shown.__dict__["compared"] = json.loads(shown.model_dump_json(include=fields))
    assert then.__dict__["compared"] == now.__dict__["compared"], AGAIN.format(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_follows_from_its_values_by_today_s_statistics(name: str) -> None:
    shown = page(name)
    lines = [line for row in shown.rows for line in row.lines]
    for cell in (cell for line in lines for cell in line.cells if cell is not None):
        mean, half_width, _ = summarise_seeds(list(cell.values.values()))
        assert cell.mean == pytest.approx(mean), AGAIN.format(name)
        assert cell.half_width == (None if half_width is None else pytest.approx(half_width)), AGAIN.format(name)
    said = [
        found.sentence
        for found in compare_lines(shown.columns, *compared_lines(shown.rows, load_table(name).reference, paper_protocol(name).prints))
    ]
    assert [found.sentence for found in shown.comparisons] == said, AGAIN.format(name)


RESULTS = sorted((ROOT / "results/tables").rglob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_page_has_the_values_of_the_committed_runs(path: Path) -> None:
    """`dml tables import` continues them in another project."""
    result = read_sealed(path, TableResult)
    assert result is not None
    assert path == ROOT / f"results/tables/{result.name}.json"
    assert all(run.commit is not None and not run.is_imported for run in result.runs)

    def values(table: ShownTable) -> dict[tuple[str, str], list[dict[int, float] | None]]:
        return {(row.name, line.system): [cell.values if cell else None for cell in line.cells] for row in table.rows for line in row.lines}

    assert values(page(result.name)) == values(shown_table(result.name, load_table(result.name), result)), AGAIN.format(result.name)


@pytest.mark.proof  # Nemenyi's distance of 32 systems takes a minute
@pytest.mark.parametrize("name", NAMES)
def test_a_page_ranks_its_values_as_today_s_statistics_do(name: str) -> None:
    shown = page(name)
    ranking = rank_lines(shown.columns, compared_lines(shown.rows, None, paper_protocol(name).prints)[0], load_table(name).tuned_on)
    assert (shown.ranking and shown.ranking.sentence) == (ranking and ranking.sentence), AGAIN.format(name)


@pytest.mark.parametrize("name", NAMES)
def test_markdown_and_html_of_a_page_show_its_json(name: str) -> None:
    shown = page(name)
    assert (PAGES / f"{name}.md").read_text() == as_markdown(shown), AGAIN.format(name)
    text = (PAGES / f"{name}.html").read_text()
    html = read(text)
    assert "`" not in "".join(note.text for note in html.all("p", "note")), AGAIN.format(name)
    diagrams = [figure.all("img")[0].attributes["src"] for figure in html.all("figure", "ranks")]
    assert [str(source)[:22] for source in diagrams] == (["data:image/webp;base64"] if shown.ranking else []), AGAIN.format(name)
    assert ("paper's system" in text) == (shown.page is not None), "a table of the project has no rows of a paper"
    printed = [cell.text for row in html.all("tr", "printed") for cell in row.all("td")]
    assert not printed or {*printed} != {"-"}, "no lines of dashes where the paper prints no values"
    figures = [cell.all("span", "figure")[0].text for cell in html.all("td", "measured")]
    expected = [
        column.measured(cell.mean) + (f" ± {column.measured(cell.half_width)}" if cell.half_width is not None else "")
        for row in shown.rows
        for line in row.lines
        for column, cell in zip(shown.columns, line.cells, strict=True)
        if cell is not None
    ]
    assert figures == expected, AGAIN.format(name)


@pytest.mark.parametrize("name", [name for name in NAMES if load_table(name).stand_ins])
def test_what_was_measured_on_stand_ins_is_marked_on_its_page_and_on_the_index(name: str) -> None:
    shown, html = page(name), read((PAGES / f"{name}.html").read_text())
    for dataset, paper in load_table(name).stand_ins.items():
        heads = [cell.text for cell in html.all("th", "stand-in") if cell.text.startswith(dataset)]
        has_values = dataset in {shown.columns[index].dataset for index in shown.order}
        assert heads == ([f"{dataset} stand-in for {paper}"] if has_values else [])
    cells = [
        cell
        for row in shown.rows
        for line in row.lines
        for column, cell in zip(shown.columns, line.cells, strict=True)
        if cell is not None and column.stands_in_for is not None
    ]
    assert len(html.all("td", "stand-in")) == len(cells)
    title = load_table(name).title
    (entry,) = [entry for entry in read((PAGES / INDEX).read_text()).all("li") if title in entry.text]
    is_measured = shown.own_data.rows > 0 or shown.stand_in.rows > 0
    assert (f"{shown.own_data.rows} of {shown.num_to_run} rows measured on the paper's datasets" in entry.text) == is_measured
    assert bool(entry.all("div", "stand-in")) == (shown.stand_in.rows > 0)


def test_the_index_is_that_of_the_pages() -> None:
    assert (PAGES / INDEX).read_text() == index_page(PAGES), AGAIN.format("TABLE...")
