"""The index of the tables' pages: what is measured leads, the other tables are folded with what they need."""

from pathlib import Path
from typing import Any

import pytest

from tasks.reports.table_pages import index_page
from tasks.runs.tuned import STANDING
from tasks.tables.file import load_table, table_names
from tasks.tables.result import TableResult
from tasks.tables.shown import Counted
from tasks.tables.view import shown_table
from tests.tasks.reports.conftest import Element, read

MEASURED: dict[str, dict[str, Any]] = {
    "sgsl/figure3": {"own_data": Counted(rows=2)},
    "discriminative/table3": {"own_data": Counted(rows=1), "stand_in": Counted(rows=1)},
    "softtriple/figure3": {"stand_in": Counted(rows=2)},
    "project/claims": {"own_data": Counted(rows=3)},
    "heated_up_softmax/figure2": {},  # has a page, and no measurement
}


def write_pages(folder: Path, pages: dict[str, dict[str, Any]]) -> Element:
    """Write pages with these counts and return the index of the folder."""
    for name, counts in pages.items():
        table = shown_table(name, load_table(name), TableResult(name=name)).model_copy(update=counts)
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(table.model_dump_json())
        path.with_suffix(".html").write_text("a page")
    return read(index_page(folder))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Element:
    return write_pages(tmp_path_factory.mktemp("pages"), MEASURED)


def links(part: Element) -> list[str]:
    return [str(link.attributes["href"]).removesuffix(".html") for link in part.all("a")]


def test_measured_tables_lead_own_data_before_stand_ins_before_the_project_s_own(index: Element) -> None:
    sections = index.all("section")
    assert [links(section) for section in sections] == [
        ["discriminative/table3", "sgsl/figure3"],
        ["softtriple/figure3"],
        ["project/claims"],
    ]
    assert [bool(section.all("div", "stand-in")) for section in sections] == [True, True, False]
    assert "SGSL, Figure 3" in sections[0].text
    (lead,) = index.all("p", "lead")
    assert lead.text == "3 of the papers' 40 tables and figures have measurements: 2 on the paper's datasets, 1 on stand-ins only."


def test_the_other_tables_are_folded_each_once_with_its_command_and_datasets(index: Element) -> None:
    (folded,) = index.all("details")
    assert "open" not in folded.attributes
    assert links(folded) == ["heated_up_softmax/figure2"]
    expected = [name for name in table_names() if name != STANDING and MEASURED.get(name, {}) == {}]
    entries = folded.all("li")
    assert [entry.all("code")[0].text for entry in entries] == [f"dml reproduce {name}" for name in expected]
    needs = {name: entry.all("div", "state")[0].text.partition(f"{name} ")[2] for name, entry in zip(expected, entries, strict=True)}
    assert needs["softtriple/table1"] == "needs cub200"
    assert needs["sgsl/table1"] == "needs cub200, cars196, sop"
    assert needs["heated_up_softmax/figure2"] == "needs cars196", "a stand-in is no need"
    assert needs["heated_up_softmax/figure3"] == "fetches its datasets itself"
    num_inshop = sum("inshop" in words.replace(",", "").split() for words in needs.values())
    assert f"{len(expected)} tables and figures without measurements. Datasets that they need: cars196 (" in folded.all("summary")[0].text
    assert f"inshop ({num_inshop})" in folded.all("summary")[0].text


def test_without_any_measurement_the_list_is_open(tmp_path: Path) -> None:
    empty = write_pages(tmp_path, {"heated_up_softmax/figure2": {}})
    (listed,) = empty.all("details")
    assert "open" in listed.attributes
    assert not empty.all("section")
