"""The pages in Chromium, opened as files: selection with mouse and keyboard, at the width of a desktop and a phone."""

import html
import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tasks.environment import Project
from tasks.reports.table_pages import HISTORY, SITE, TablePage
from tasks.watch.history import write_history
from tasks.watch.records import RowVerdict, Verdict, Verification
from tasks.watch.storage import read_references, write_verification
from tests.tasks.reports.made_up_runs import HOSTILE, TRIPLET

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(params=[1280, 390])
def tab(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A tab of this width, which must request only files and have no script errors."""
    page = browser.new_page(viewport={"width": request.param, "height": 844})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:", "blob:")) else wrong.append(asked.url))
    yield page
    assert page.title() != "owned"
    page.close()
    assert wrong == []


def script(path: Path) -> Any:
    return json.loads(path.read_text().partition(" = ")[2].removesuffix(";\n"))


def labels_of(tab: Any, css: str) -> list[str]:
    return [str(label) for label in tab.eval_on_selector_all(css, "all => all.map(one => one.getAttribute('aria-label'))")]


def expected(folder: Path, query: int) -> list[str]:
    """Return the labels of the pictures of a query and its neighbours."""
    items, run = script(folder / "items.js"), script(folder / "run.js")
    name = [items["classes"][label] for label in items["labels"]]
    shown = run["neighbours"][query * run["width"] : (query + 1) * run["width"]]
    kinds = ["correct" if items["labels"][one] == items["labels"][query] else "wrong" for one in shown]
    neighbours = [f"{kind} neighbour: {name[one]}, image {one}" for kind, one in zip(kinds, shown, strict=True)]
    return [f"query: {name[query]}, image {query}", *neighbours]


def shows(tab: Any, folder: Path, query: int) -> bool:
    """Return whether the page shows a query and its neighbours, once the browser has followed the link."""
    wanted = expected(folder, query)
    tab.wait_for_function("label => document.querySelector('#neighbours .pic').getAttribute('aria-label') === label", arg=wanted[0])
    return labels_of(tab, "#neighbours .pic") == wanted


@pytest.mark.parametrize("tab", [390], indirect=True)
def test_a_selected_image_shows_its_neighbours(tab: Any, single: Path) -> None:
    tab.goto((single / "index.html").as_uri())
    assert shows(tab, single, 0)
    tab.fill("#class", "kind 3")
    tab.press("#class", "Enter")
    assert shows(tab, single, 36)
    tab.click("#members button:nth-child(5)")
    assert shows(tab, single, 40)
    assert tab.input_value("#number") == "40"
    assert tab.url.endswith("#image=40")
    tab.fill("#number", "71")
    tab.click("#choose button[type=submit]")
    assert shows(tab, single, 71)
    tab.focus("#next")
    tab.keyboard.press("Enter")
    assert shows(tab, single, 72)
    tab.focus("#members button:nth-child(2)")
    tab.keyboard.press("Space")
    assert shows(tab, single, 73)
    neighbour = script(single / "run.js")["neighbours"][73 * 8]
    tab.click("#neighbours .shot:nth-child(2) a")
    assert shows(tab, single, neighbour)
    tab.fill("#number", "5000")
    tab.press("#number", "Enter")
    assert "numbers are 0 to 107" in tab.text_content("#status")
    tab.fill("#class", "zebra")
    tab.press("#class", "Enter")
    assert "no class name contains" in tab.text_content("#status")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("tab", [390], indirect=True)
def test_worst_queries_link_to_their_neighbours_and_the_map_is_drawn(tab: Any, single: Path) -> None:
    tab.goto((single / "index.html").as_uri())
    link = tab.locator("#worst a").first
    number = int(str(link.get_attribute("href")).partition("=")[2])
    link.click()
    assert shows(tab, single, number)
    assert tab.evaluate("typeof Plotly") == "undefined", "megabytes that only a map in view needs"
    tab.locator("#drawn").scroll_into_view_if_needed()
    tab.wait_for_selector("#drawn .scatterlayer .point")
    sizes = (
        "document.getElementById('drawn').data.flatMap(({customdata, marker}) => customdata.map((query, at) => [query, marker.size[at]]))"
    )
    assert [query for query, size in tab.evaluate(sizes) if size == 22] == [number], "the selected image's point is larger"
    assert tab.locator("#drawn .scatterlayer .point").count() == 108
    ranks = script(single / "run.js")["firstRanks"]
    traces = tab.evaluate("document.getElementById('drawn').data.map(({name, customdata, text}) => [name, customdata, text])")
    assert {name: [ranks[query] == 1 for query in queries] for name, queries, _ in traces} == {
        "correct at rank 1": [True] * ranks.count(1),
        "wrong at rank 1": [False] * (108 - ranks.count(1)),
    }
    assert f"{html.escape(HOSTILE, quote=False)}, image 0" in [text for _, _, texts in traces for text in texts]
    tab.evaluate("document.getElementById('drawn').emit('plotly_click', {points: [{customdata: 17}]})")
    assert shows(tab, single, 17)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    edges = "all => all.map(one => getComputedStyle(one).borderTopStyle)"  # right and wrong differ by more than colour
    assert set(tab.eval_on_selector_all(".wrong .pic", edges)) == {"dashed"}
    tab.evaluate(f"choose({script(single / 'run.js')['firstRanks'].index(1)})")
    assert set(tab.eval_on_selector_all("#neighbours .right .pic", edges)) == {"solid"}


def test_a_table_without_scripts_has_its_values_and_no_control_that_does_nothing(browser: Any, page: TablePage) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    for width in (1280, 390):
        tab.set_viewport_size({"width": width, "height": 844})
        tab.goto(page.html.absolute().as_uri())
        values = tab.locator("td.measured .figure").all()
        assert values
        assert all(value.is_visible() for value in values)
        assert tab.locator("tbody .name").first.is_visible()
        controls = tab.locator("#theme, .toolbar, .toolbar select").all()
        assert len(controls) == 3
        assert not any(control.is_visible() for control in controls)
    context.close()


@pytest.mark.parametrize("tab", [1280], indirect=True)
def test_a_table_is_sorted_with_rows_without_a_figure_last(tab: Any, page: TablePage) -> None:
    for how, first in (("descending", "softtriple"), ("ascending", "semihard")):
        tab.goto(f"{page.html.absolute().as_uri()}#sort=1,{how}")
        tab.reload()
        rows = tab.eval_on_selector_all("tbody[data-row]", "all => all.map(one => one.dataset.row)")
        assert (rows[0], rows[-1]) == (first, "one-day")
        assert tab.eval_on_selector_all(f"th[aria-sort={how}] button", "all => all.map(one => one.dataset.key)") == ["1"]


def test_a_run_s_page_without_scripts_has_its_worst_queries_and_scores_and_no_link_that_does_nothing(browser: Any, single: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto((single / "index.html").as_uri())
    assert "need JavaScript" in tab.locator("#any").inner_text()
    assert tab.locator("#worst .pic").first.is_visible()
    assert tab.locator("#scores td").first.is_visible()
    dead = tab.locator("#choose, #members, #map, a[href='#map'], #worst h3 a").all()
    assert len(dead) > 5
    assert not any(part.is_visible() for part in dead)
    context.close()


def test_a_page_is_dark_where_the_system_is(browser: Any, comparison: Path) -> None:
    shades = []
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto((comparison / "index.html").as_uri())
        shades.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click("#theme")
        shades.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.close()
    assert shades[0] == shades[3] == "rgb(255, 255, 255)"
    assert shades[1] == shades[2] != shades[0]


def test_verifications_of_rows_with_long_names_are_no_wider_than_the_window(tab: Any, tmp_path: Path) -> None:
    row = RowVerdict(row=f"paper/table1:{'long_' * 20}row variant:data", seed=0, verdict=Verdict.FAILED, reason=f"/{'place_' * 20}: gone")
    verification = Verification(name="paper/table1", started_at=datetime(2026, 11, 1, tzinfo=UTC), seconds=1, commit="c" * 40, rows=(row,))
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/none.db")
    write_verification(project.state, verification)
    write_history(project, read_references(project))
    tab.goto((tmp_path / SITE / HISTORY).as_uri())
    tab.click("summary")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_pages_of_long_names_are_no_wider_than_the_window(tab: Any, comparison: Path, tmp_path: Path) -> None:
    """Names have up to 100 characters; a long one pushed the button of the theme out of the window, or covered a phone's table."""
    folder = Path(shutil.copytree(comparison, tmp_path / "copy"))
    for page in ("index.html", f"run-02-{TRIPLET}.html"):
        text = (folder / page).read_text().replace("photos", "photos_" * 14)
        for before in (">", "\n"):  # as content, not in a file's name
            text = text.replace(f"{before}{TRIPLET}", f"{before}{'long_name_' * 10}")
        (folder / page).write_text(text)
        tab.goto((folder / page).as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), page
        names = tab.eval_on_selector_all(".numbers tbody th", "all => all.map(one => one.offsetWidth)")
        assert tab.viewport_size["width"] > 760 or max(names) < tab.viewport_size["width"] / 2, page


@pytest.mark.parametrize("tab", [390], indirect=True)
def test_a_comparison_shows_queries_correct_in_one_run_and_wrong_in_another(tab: Any, comparison: Path) -> None:
    tab.goto((comparison / "index.html").as_uri())
    runs = script(comparison / "comparison.js")
    by_name = {run["name"]: run["firstRanks"] for run in runs}
    names = tab.eval_on_selector_all("#one option", "all => all.map(one => one.textContent)")
    assert names == list(by_name)

    def wanted(one: str, other: str) -> set[int]:
        return {query for query, ranks in enumerate(zip(by_name[one], by_name[other], strict=True)) if ranks[0] == 1 and ranks[1] > 1}

    for one, other in ((names[0], names[2]), (names[2], names[1])):
        tab.select_option("#one", label=one)
        tab.select_option("#other", label=other)
        assert tab.text_content("#status") == f"{len(wanted(one, other))} queries"
        while tab.is_visible("#more"):
            tab.click("#more")
        shown = labels_of(tab, "#cards .query .pic")
        assert {int(label.rpartition(" ")[2]) for label in shown} == wanted(one, other)
    tab.click("#swap")
    assert tab.text_content("#status") == f"{len(wanted(names[1], names[2]))} queries"
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.click("#runs tbody a >> nth=0")
    tab.wait_for_selector("#neighbours .pic")
    assert tab.title().endswith(f"/ {names[0]} / seed 0")
