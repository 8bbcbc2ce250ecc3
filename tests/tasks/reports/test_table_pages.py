"""A table's page as a parser reads it: every row, no injected markup from labels, nothing loaded from elsewhere."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from PIL import Image

from dml_core.errors import ConfigError
from tasks.environment import Project
from tasks.plans.results import load_result
from tasks.reports import table_pages
from tasks.reports.table_pages import TablePage, write_site
from tasks.runs.specs import Params
from tasks.tables.result import TableResult, save_result
from tasks.tracking.child_run import PublishedRun
from tests.tasks.reports.conftest import Element, read
from tests.tasks.reports.made_up_table import HOSTILE, NAME, TABLE


def rows(html: Element) -> dict[str, Element]:
    return {str(body.attributes["data-row"]): body for body in html.all("tbody") if "data-row" in body.attributes}


def lines(row: Element) -> dict[str, Element]:
    return {line.all("th")[0].text: line for line in row.all("tr", "line")}


def test_every_row_is_there_in_the_paper_s_order_with_its_printed_figures(html: Element) -> None:
    assert list(rows(html)) == list(TABLE["rows"])
    for name, row in rows(html).items():
        printed = row.all("tr", "printed")[0]
        assert [cell.text for cell in printed.all("td")] == ["-" if v is None else f"{v:.1f}" for v in TABLE["rows"][name]["published"]]
        assert printed.all("span", "kind")[0].text == TABLE["rows"][name]["kind"]
    assert "the clustering paper <b>[23]</b>" in rows(html)["semihard"].text, "a quoted row names its source"
    assert [line.all("th")[0].text for line in rows(html)["softtriple"].all("tr", "others")] == [
        "released logs",
        "independent somebody, ResNet-50, 64-d",
    ]


def test_a_label_is_text_and_never_markup(html: Element, page: TablePage) -> None:
    assert rows(html)["softtriple"].all("span", "name")[0].text == HOSTILE
    assert rows(html)["softtriple"].attributes["data-label"] == HOSTILE
    assert len(html.all("script")) == 1
    assert "<script>alert" not in page.html.read_text()


def test_code_in_prose_is_marked_and_escaped(html: Element) -> None:
    """Prose of a table's file is Markdown in the other files of the page: its backticks were shown on the page."""
    (note,) = [source for source in rows(html)["softtriple"].all("span", "source") if source.text.startswith("ten centres")]
    assert [code.text for code in note.all("code")] == ["num_centres: <10>"]
    assert "`" not in note.text


def test_each_verdict_has_a_mark_and_a_word_and_not_only_a_colour(html: Element) -> None:
    marks = {"compatible": "=", "above": "▲", "below": "▼", "undecided": "?"}
    seen = set()
    for cell in html.all("td", "measured"):
        if "plain" in str(cell.attributes["class"]).split():
            continue  # an epoch that the paper does not print
        (verdict,) = set(str(cell.attributes["class"]).split()) & marks.keys()
        assert cell.all("span", "verdict")[0].text.startswith(f"{marks[verdict]} {verdict}")
        seen.add(verdict)
    assert seen == marks.keys()
    assert all(mark in html.all("details", "legend")[0].text for mark in marks.values())


def test_an_interval_is_drawn_and_described(html: Element) -> None:
    cell = lines(rows(html)["softtriple"])["as_published 5 seeds"].all("td")[1]
    assert cell.all("span", "figure")[0].text == "70.1 ± 0.3"
    (glyph,) = cell.all("svg")
    said = str(glyph.attributes["aria-label"])
    assert said.startswith("mean 70.1; 95 % interval 69.8 to 70.4; published 71.9; prediction interval of one run 69.3 to 70.9; seed 0: ")
    assert len(glyph.all("line", "seed")) == 5
    (mean,), (printed,), (band,) = glyph.all("circle"), glyph.all("line", "at"), glyph.all("rect")
    left, right = (low := float(str(band.attributes["x"]))), low + float(str(band.attributes["width"]))
    assert left < float(str(mean.attributes["cx"])) < right < float(str(printed.attributes["x1"])), (
        "below: the figure lies right of the band"
    )


def test_rows_that_cannot_be_run_name_the_reason(html: Element) -> None:
    assert rows(html)["one-day"].all("tr", "waits")[0].text == "not run on cub200: a loss that nobody has written"
    assert "dataset 'cub200' is not in params.yaml; add below datasets: cub200: {" in rows(html)["later"].all("tr", "waits")[0].text
    assert rows(html)["softtriple"].all("tr", "waits")[0].text.startswith("not run on cars196: dataset 'cars196' is not in params.yaml")
    assert "the loss is not finite at step 17" in rows(html)["softmax-norm"].all("tr", "failed")[0].text


def test_older_code_an_oracle_and_changed_settings_are_marked(html: Element) -> None:
    marks = {line: [mark.text for mark in row.all("span", "mark")] for line, row in lines(rows(html)["softtriple"]).items()}
    assert [mark for line in marks if "oracle" in line for mark in marks[line]] == ["oracle epoch (chosen on the test classes)"]
    (older,) = [marks[line] for line in marks if line.startswith("as_released")]
    assert older == ["made by other code: dml_core/losses/multi_centre.py", "the settings of this row have changed since (cub200)"]
    assert "rows that were removed from the table (gone)" in html.text


def test_claims_are_judged_with_their_difference(html: Element) -> None:
    (claims,) = html.all("section", "claims")
    found = {claim.all("span", "what")[0].text: claim.text for claim in claims.all("li", "claim")}
    assert found["Ten centres are better than one."].startswith("✓ holds")
    assert "R@1 on cub200: 60.3 vs 57.9, difference +2.4 ± " in found["Ten centres are better than one."]
    assert found["Ten centres cluster worse."].startswith("✗ refuted")
    assert found["R@8 is above 0.88."].startswith("≈ not shown")
    assert "1 not decided runs or scores missing" in claims.text
    assert "no runs of 'later'" in claims.text


def test_significant_differences_are_above_the_table_with_every_pair(html: Element) -> None:
    (differences,) = html.all("section", "differences")
    (sentence,) = differences.all("p", "sentence")
    assert sentence.text.startswith("cub200: ")
    assert f"{HOSTILE}, as_published" in sentence.text
    assert "oracle" not in sentence.text, "scores of another epoch are not a separate system"
    pairs = differences.all("table", "pairs")[0]
    systems = [head.text for head in pairs.all("thead")[0].all("th")]
    assert len(systems) == 3, "every line of the last epoch is a system: two of SoftTriple, one of the softmax"
    matrix = [[cell.text for cell in row.all("td")] for row in pairs.all("tbody")[0].all("tr")]
    assert [row[0] for row in zip(systems, matrix, strict=True)] == [row.all("th")[0].text for row in pairs.all("tbody")[0].all("tr")]
    for number, row in enumerate(matrix):
        for other, cell in enumerate(row):
            marks = {"▲": "▼", "▼": "▲"}
            assert marks.get(cell[:1], "") == (matrix[other][number][:1] if matrix[other][number][:1] in marks else "")
    assert {cell for row in matrix for cell in row} >= {"not compared"}, "one seed is compared with nothing"
    lead = [cell for cell in html.all("td", "measured") if "lead" in str(cell.attributes["class"]).split()]
    assert lead
    assert all(cell.attributes["data-column"] == "cub200 R@1" for cell in lead)
    assert not differences.all("img"), "two systems with shared seeds have no ranks"


def test_a_row_opens_to_what_differs_from_the_protocol_first_then_to_everything(html: Element) -> None:
    (run,) = rows(html)["softmax-norm"].all("section", "run")
    assert [[cell.text for cell in row.children if isinstance(cell, Element)] for row in run.all("table", "plain")[0].all("tr")[1:]] == [
        ["loss.options.margin", "0", "0.01"],
        ["loss.options.num_centres", "1", "10"],
        ["loss.options.regulariser_weight", "0", "0.2"],
    ]
    settings = {pair.all("dt")[0].text: pair.all("dd")[0].text for pair in run.all("div") if pair.all("dt")}
    assert (settings["loss.options.num_centres"], settings["sampler.batch_size"]) == ("1", "32")
    assert settings["evaluation.recall_at"] == "1, 2, 4, 8"
    assert len(run.all("table", "seeds")[0].all("tr")) == 6
    assert "dml ui" in run.text


def test_pictures_of_the_first_seed_are_embedded(html: Element) -> None:
    (run,) = rows(html)["softmax-norm"].all("section", "run")
    pictures = run.all("img")
    assert [figure.text.split(",")[0] for figure in run.all("figcaption")] == ["loss over epochs", "retrieval gallery", "counts"]
    assert all(str(picture.attributes["src"]).startswith("data:image/webp;base64,") for picture in pictures)
    assert all(HOSTILE not in str(picture.attributes["alt"]) and "seed 0" in str(picture.attributes["alt"]) for picture in pictures)


def test_a_figure_s_pictures_are_on_the_page_and_a_table_s_in_opened_rows(table_project: "tuple[Project, Params]", html: Element) -> None:
    project, params = table_project
    figure = NAME.replace("table1", "figure1")
    tables = project.root / "tables"
    (tables / f"{figure}.yaml").write_text((tables / f"{NAME}.yaml").read_text())
    save_result(project, load_result(project, NAME).model_copy(update={"name": figure}))
    try:
        page = read(write_site(project, params, [figure])[0].html.read_text())
    finally:
        (tables / f"{figure}.yaml").unlink()
        write_site(project, params, [NAME])  # restores the index for the other tests
    (figures,) = page.all("section", "measured-figure")
    captions = [caption.text for caption in figures.all("figcaption")]
    assert any(caption.startswith(f"{HOSTILE}, as_published, cub200 : counts, seed 0") for caption in captions)
    assert len(captions) == 5
    assert all("cub200 : counts, seed 0" in caption for caption in captions)
    (run,) = rows(page)["softmax-norm"].all("section", "run")
    assert [caption.text.split(",")[0] for caption in run.all("figcaption")] == ["loss over epochs", "retrieval gallery"]
    assert len(page.all("img")) == len(html.all("img")), "none is carried twice"
    assert not html.all("section", "measured-figure")


def test_a_table_of_the_project_says_nothing_of_published_values(table_project: "tuple[Project, Params]", html: Element) -> None:
    project, params = table_project
    row = {key: TABLE["rows"]["softtriple"][key] for key in ("label", "kind", "variants")}
    own = {"title": "Own", "states": "", "columns": TABLE["columns"], "rows": {"softtriple": {**row, "published": [None] * 6}}}
    path = project.root / "tables" / "project" / "own.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(own))
    result = load_result(project, NAME)
    runs = tuple(run for run in result.runs if run.row == "softtriple")
    save_result(project, result.model_copy(update={"name": "project/own", "runs": runs}))
    try:
        page = read(write_site(project, params, ["project/own"])[0].html.read_text())
    finally:
        shutil.rmtree(path.parent)
        write_site(project, params, [NAME])  # restores the index for the other tests
    assert "published" not in page.all("details", "legend")[0].text
    assert "published" in html.all("details", "legend")[0].text
    assert not page.all("span", "kind")
    assert [row.all("td") for row in page.all("tr", "printed")] == [[]], "no line of dashes"
    assert "dot and bar: mean and 95 % interval" in page.all("details", "legend")[0].text
    assert "paper's" not in page.all("script")[0].text, "the order of its rows is its own"
    assert all("hidden" in part.attributes for part in page.all("div", "toolbar")[0].all() if part.tag in ("label", "select"))


def test_the_page_and_the_index_load_nothing(page: TablePage) -> None:
    for path in (page.html, page.html.parents[1] / table_pages.INDEX):
        text = path.read_text()
        root = read(text)
        loaded = [element.attributes.get(name, "") for element in root.all() for name in ("src", "srcset", "data", "action")]
        assert all(str(source).startswith("data:") for source in loaded if source)
        assert not root.all("link") + root.all("iframe") + root.all("object")
        assert not re.search(r"url\(|@import|https?://", text)
        assert "default-src 'none'" in text


def test_the_index_links_to_the_page_and_has_its_progress(page: TablePage) -> None:
    root = read((page.html.parents[1] / table_pages.INDEX).read_text())
    (item,) = root.all("ul", "index")[0].all("li")
    assert item.all("a")[0].attributes["href"] == "softtriple/table1.html"
    assert (page.html.parents[1] / str(item.all("a")[0].attributes["href"])).samefile(page.html)
    for said in ("2 of 4 rows measured", "2 below", "1 claim holds", "some rows made by other code"):
        assert said in item.text


def test_an_index_of_something_else_is_not_replaced(table_project: "tuple[Project, Params]", tmp_path: Path) -> None:
    (tmp_path / table_pages.INDEX).write_text("<title>My page</title>")
    with pytest.raises(ConfigError, match=r"index\.html: is not an index of tables; choose another folder with -o"):
        write_site(*table_project, [NAME], tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["<title>My page</title>"]


@pytest.mark.parametrize("suffix", [".html", ".json", ".md"])
def test_a_file_of_a_page_s_name_is_not_replaced(
    table_project: "tuple[Project, Params]", tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / f"{NAME}{suffix}"
    own.parent.mkdir()
    own.write_text("my notes")
    with pytest.raises(ConfigError, match=rf"{suffix}: exists already, and .* has no index of tables; choose another folder with -o$"):
        write_site(*table_project, [NAME], tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [own]
    assert own.read_text() == "my notes"
    own.unlink()
    monkeypatch.setattr(table_pages.PictureCache, "save", Mock(side_effect=[None, KeyboardInterrupt, None]))
    with pytest.raises(KeyboardInterrupt):
        write_site(*table_project, [NAME, NAME], tmp_path)
    write_site(*table_project, [NAME], tmp_path)  # pages of an interrupted command are


def test_the_same_results_give_the_same_bytes(table_project: "tuple[Project, Params]", page: TablePage, tmp_path: Path) -> None:
    project, params = table_project
    result = load_result(project, NAME)
    save_result(project, TableResult(**result.model_dump() | {"runs": result.runs[::-1]}))
    again = write_site(project, params, [NAME], tmp_path)[0]
    save_result(project, result)
    for first, second in zip(page.files, again.files, strict=True):
        assert Path(first).read_bytes() == Path(second).read_bytes()
    assert json.loads(again.files[1].read_text())["own_data"]["verdicts"] == {"compatible": 7, "above": 1, "below": 2, "undecided": 5}


def test_a_run_with_missing_or_damaged_pictures_is_still_shown(
    table_project: "tuple[Project, Params]", page: TablePage, tmp_path: Path
) -> None:
    project, params = table_project
    store = tmp_path / "store"
    shutil.copytree(project.store, store)
    (store / "evaluate/softmax-norm-as_published-last-0/figures/curve.png").write_bytes(b"no picture")
    shutil.rmtree(store / "evaluate/softtriple-as_released-last-0")
    there = Project(project.root, project.state, str(store), project.tracking_uri)
    found = rows(read(write_site(there, params, [NAME], tmp_path / "site")[0].html.read_text()))
    assert "too large for the page, or damaged" in found["softmax-norm"].text
    assert len(found["softmax-norm"].all("img")) == 2
    assert "No pictures of seed 0: not in this store" in found["softtriple"].text


def test_with_a_server_a_run_links_to_its_page_there(
    table_project: "tuple[Project, Params]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, params = table_project
    tags = {"dml.variant": "softmax-norm as_published", "dml.seed": "3"}
    monkeypatch.setattr(table_pages, "published_runs", lambda uri, dataset, comparison: [PublishedRun("abc", tags=tags, experiment_id="7")])
    there = Project(project.root, project.state, project.store, "http://tracking.example:5000/")
    found = rows(read(write_site(there, params, [NAME], tmp_path)[0].html.read_text()))
    links = [link.attributes["href"] for link in found["softmax-norm"].all("a")]
    assert links == ["http://tracking.example:5000/#/experiments/7/runs/abc?workflowType=machine_learning"]


@pytest.mark.proof
def test_a_page_of_many_pictures_stays_small(table_project: "tuple[Project, Params]", tmp_path: Path) -> None:
    project, params = table_project
    store = tmp_path / "store"
    shutil.copytree(project.store, store)
    folder = store / "evaluate/softmax-norm-as_published-last-0/measurements/maps"
    folder.mkdir(parents=True)
    gallery = Image.open(folder.parents[1] / "figures/gallery.png")
    for number in range(60):
        gallery.save(folder / f"{number}.png", compress_level=1)
    there = Project(project.root, project.state, str(store), project.tracking_uri)
    written = write_site(there, params, [NAME], tmp_path / "site")[0]
    assert written.html.stat().st_size < 5_000_000
    assert len(read(written.html.read_text()).all("figure")) == 60 + 15


# ---------------------------------------------------------------- sorting


def test_the_sort_keys_are_the_figures_and_the_headers_are_buttons(html: Element) -> None:
    keys = {name: (row.attributes["data-printed"], row.attributes["data-measured"]) for name, row in rows(html).items()}
    assert keys["one-day"] == ("61 - - - - -", "- - - - - -")
    assert keys["softmax-norm"] == ("57.8 70 80.1 87.9 65.3 -", "57.9 70.05 77.9 87.9 64.5 -")
    heads = [head for head in html.all("table", "results")[0].all("thead")[0].all("th") if "aria-sort" in head.attributes]
    assert [head.all("button")[0].attributes["data-key"] for head in heads] == ["label", "0", "1", "2", "3", "4", "5"]
    assert {head.attributes["aria-sort"] for head in heads} == {"none"}
