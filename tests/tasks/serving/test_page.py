"""The pages in a real browser, at the width of a phone and a desktop: images are chosen, dropped or found, and searched with."""

import base64
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from dml_core.index.index import Index
from tasks.serving.pages import search_page
from tests.conftest import ROOT
from tests.tasks.serving.conftest import LONG_POSITION, Made, Service

WAIT_MILLISECONDS = 120_000  # reached only when nothing happens any more
CHROMIUM = "/usr/bin/chromium"
TOKEN = "a token of letters enough"
FITS = """document.documentElement.scrollWidth <= window.innerWidth
    && [...document.querySelectorAll(".hit, .hit > span")].every((part) => part.scrollWidth <= Math.ceil(part.clientWidth))"""
CUT = """[...document.querySelectorAll(".class, .name")].flatMap((name) => [...name.childNodes]).filter((part) => {
    const range = document.createRange();
    range.selectNodeContents(part);
    return part.nodeType === Node.TEXT_NODE && range.getClientRects().length > 1;
}).map((part) => part.data)"""


def test_the_page_is_one_file_that_loads_nothing() -> None:
    page, policy = search_page()
    assert "http://" not in page
    assert "https://" not in page
    assert "page.css" not in page
    assert "page.js" not in page
    assert "'unsafe" not in policy


def test_the_page_is_the_same_in_a_locale_that_is_not_utf_8() -> None:
    """It had other letters in a Latin-1 locale, and was an error in an ASCII one."""
    shown = "from tasks.serving.pages import search_page; print(ascii(search_page()))"
    ascii_locale = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    printed = subprocess.run([sys.executable, "-c", shown], env=ascii_locale, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed == f"{search_page()!a}\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        expect.set_options(timeout=WAIT_MILLISECONDS)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Browser, url: str, width: int, complaints: list[str]) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.set_default_timeout(WAIT_MILLISECONDS)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((url, "data:", "blob:")) else complaints.append(request.url))
    page.goto(url)
    return page


def shoot(page: Page, name: str) -> None:
    """Save a screenshot to the folder DML_SHOTS, if set."""
    if "DML_SHOTS" in os.environ:
        page.screenshot(path=str(Path(os.environ["DML_SHOTS"]) / f"{name}.png"), full_page=True)


def drop(page: Page, *paths: Path) -> None:
    """Drop files; without any, a piece of text."""
    files = [(base64.b64encode(path.read_bytes()).decode(), path.name) for path in paths]
    page.evaluate(
        """(files) => {
            const transfer = new DataTransfer();
            if (!files.length) transfer.setData("text/plain", "a word");
            for (const [data, name] of files) {
                transfer.items.add(new File([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], name));
            }
            for (const kind of ["dragenter", "dragover", "drop"]) {
                const event = new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true });
                document.getElementById("drop").dispatchEvent(event);
            }
        }""",
        files,
    )


def fits(page: Page) -> bool:
    """Return whether nothing is wider than the page or than its card."""
    return bool(page.evaluate(FITS))


def names(cards: Locator) -> list[str]:
    """Return the file names of the hits."""
    return [cards.nth(rank).locator(".name").text_content() or "" for rank in range(cards.count())]


def nearest(made: Made, position: int, k: int) -> list[str]:
    """Return the names of the items nearest to an item, with the item itself first."""
    index = Index.open(made.index)
    return [index.item(int(found)).name for found in index.search(index.vectors_ND[position : position + 1], k)[1][0]]


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("width", [360, 1280])
def test_an_image_is_chosen_and_dropped_and_what_is_found_is_shown(made: Made, service: Service, browser: Browser, width: int) -> None:
    complaints: list[str] = []
    page = opened(browser, service.url, width, complaints)
    expect(page.locator("#served")).to_contain_text("40 images")
    shoot(page, f"empty-{width}")

    page.set_input_files("#file", made.files[3])
    cards = page.locator("#results li")
    expect(cards).to_have_count(10)
    expect(cards.first).to_contain_text(made.files[3].name)
    expect(cards.first).to_contain_text("class_003")
    expect(cards.first).to_contain_text("1. cosine 1.000")
    expect(cards.first).to_contain_text("same picture")
    expect(page.locator(".same")).to_have_count(1)
    expect(page.locator("#results img")).to_have_count(10)
    assert page.evaluate("[...document.querySelectorAll('img')].every((image) => image.complete && image.naturalWidth > 0)")
    assert fits(page)
    shoot(page, f"found-{width}")

    drop(page, made.files[8])
    expect(cards.first).to_contain_text(made.files[8].name)
    assert names(cards) == nearest(made, 8, 10)

    drop(page, made.files[LONG_POSITION])
    expect(cards.first).to_contain_text(made.files[LONG_POSITION].name)
    assert fits(page)
    assert page.evaluate(CUT) == ["withoutanyplacetobreak" * 3 + ".png"], "the only word that is longer than a card is wide"
    shoot(page, f"long-{width}")

    page.locator("#k").select_option("20")
    expect(cards).to_have_count(20)

    broken = made.project / "broken.png"
    broken.write_bytes(made.files[1].read_bytes()[:60])
    complaints_before = len(complaints)
    drop(page, broken)
    expect(page.locator("#status.wrong")).to_contain_text("image 1")
    expect(cards).to_have_count(0)
    shoot(page, f"wrong-{width}")
    assert complaints[:complaints_before] == []
    page.close()


@pytest.mark.slow
@pytest.mark.proof
def test_the_page_works_by_keyboard_alone(made: Made, service: Service, browser: Browser) -> None:
    complaints: list[str] = []
    page = opened(browser, service.url, 1280, complaints)
    page.on("filechooser", lambda _: None)  # reports choosers from here on: enabled only at the key press, it may be too late
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file"
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(made.files[5])
    expect(page.locator("#results li").first).to_contain_text(made.files[5].name)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "k"
    page.keyboard.press("ArrowUp")
    expect(page.locator("#results li")).to_have_count(5)
    page.keyboard.press("Tab")
    expect(page.locator("#results button").first).to_be_focused()
    page.keyboard.press("Tab")
    second = nearest(made, 5, 5)[1]
    position = next(place for place, path in enumerate(made.files) if path.name == second)
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_contain_text(second)
    expect(page.locator("#results button").first).to_be_focused()
    assert names(page.locator("#results li")) == nearest(made, position, 6)[1:], "without the item itself"
    shoot(page, "again-1280")
    page.go_back()
    expect(page.locator("#results li").first).to_contain_text(made.files[5].name)
    expect(page.locator("#prompt")).to_contain_text("05.png")
    page.go_forward()
    expect(page.locator("#prompt")).to_contain_text(second)
    assert complaints == []
    page.close()


@pytest.mark.slow
@pytest.mark.proof
def test_back_shows_the_query_before_after_a_reload_too(made: Made, service: Service, browser: Browser) -> None:
    """A reload loses the queries, and the browser's history keeps their numbers."""
    complaints: list[str] = []
    page = opened(browser, service.url, 1280, complaints)
    first = page.locator("#results li").first

    def ask(position: int) -> None:
        page.set_input_files("#file", made.files[position])
        expect(first).to_contain_text(made.files[position].name)

    ask(2)
    ask(3)
    page.reload()
    page.go_back()
    ask(5)
    ask(6)
    page.go_back()
    expect(first).to_contain_text(made.files[5].name)
    assert complaints == []
    page.close()


@pytest.mark.slow
@pytest.mark.proof
def test_what_is_not_one_image_is_refused_aloud(made: Made, service: Service, browser: Browser) -> None:
    """A refused drop leaves the results of the last query."""
    complaints: list[str] = []
    page = opened(browser, service.url, 360, complaints)
    drop(page, made.files[2])
    expect(page.locator("#results li")).to_have_count(10)
    for files, says in (([*made.files[:3]], "3 files: search with one image at a time."), ([], "No file was dropped")):
        drop(page, *files)
        expect(page.locator("#status.wrong")).to_contain_text(says)
        expect(page.locator("#results li").first).to_contain_text(made.files[2].name)
    page.evaluate("document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: new DataTransfer() }))")
    expect(page.locator("#status.wrong")).to_contain_text("The clipboard has no image.")
    shoot(page, "several-360")
    drop(page, made.files[4])
    expect(page.locator("#results li").first).to_contain_text(made.files[4].name)
    expect(page.locator("#status.wrong")).to_have_count(0)
    page.set_input_files("#file", made.files[6])
    expect(page.locator("#results li").first).to_contain_text(made.files[6].name)
    page.locator("#results button").nth(1).click()
    expect(page.locator("#results .same")).to_have_count(0)
    page.set_input_files("#file", made.files[6])
    expect(page.locator("#results li").first).to_contain_text(made.files[6].name)
    assert complaints == []
    page.close()


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("width", [360, 1280])
def test_the_description_of_the_interface_needs_no_network(service: Service, browser: Browser, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844})
    attempted: list[str] = []
    complaints: list[str] = []

    def only_the_service(route: Route) -> None:
        attempted.append(route.request.url)
        if route.request.url.startswith(service.url):
            route.continue_()
        else:
            route.abort()

    context.route("**/*", only_the_service)
    page = context.new_page()
    page.set_default_timeout(WAIT_MILLISECONDS)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto(f"{service.url}/docs")
    expect(page.locator("h2").first).to_be_visible()
    assert {"GET /v1/health", "POST /v1/search", "GET /v1/neighbours"} <= set(page.locator("h2").all_text_contents())
    page.get_by_role("link", name="Hit[][]").first.click()
    assert page.evaluate("location.hash") == "#Hit"
    assert page.evaluate("getComputedStyle(document.querySelector('pre')).overflowX") == "auto", "the style is applied"
    assert fits(page)
    cells = "[...document.querySelectorAll('td:first-child')].map((cell) => cell.firstChild.getClientRects().length)"
    assert set(page.evaluate(cells)) == {1}, "no field's name is cut"
    shoot(page, f"docs-{width}")
    assert attempted == [f"{service.url}/docs"]
    assert complaints == []
    context.close()


@pytest.mark.slow
@pytest.mark.proof
def test_the_page_asks_for_the_token_where_one_is_required(made: Made, start: Callable[..., Service], browser: Browser) -> None:
    service = start(str(made.index), token=TOKEN)
    page = opened(browser, service.url, 390, [])
    page.set_input_files("#file", made.files[0])
    expect(page.locator("#status.wrong")).to_contain_text("token")
    page.keyboard.type(TOKEN)
    shoot(page, "token-390")
    page.keyboard.press("Enter")
    expect(page.locator("#results li").first).to_contain_text(made.files[0].name)
    page.close()
    service.end()
