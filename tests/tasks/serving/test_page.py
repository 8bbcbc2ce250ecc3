"""The page at `/` in a real browser: images are chosen, dropped or reused as queries by keyboard, at the width of a phone and a desktop."""

import base64
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from dml_core.index.index import Index
from tasks.serving.application import read_page
from tests.tasks.serving.conftest import Made, Service

CHROMIUM = "/usr/bin/chromium"
TOKEN = "a token of letters enough"


def test_the_page_is_one_file_that_loads_nothing() -> None:
    page, policy = read_page()
    assert "http://" not in page
    assert "https://" not in page
    assert "page.css" not in page
    assert "page.js" not in page
    assert "'unsafe" not in policy


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Browser, url: str, width: int, complaints: list[str]) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((url, "data:", "blob:")) else complaints.append(request.url))
    page.goto(url)
    return page


def shoot(page: Page, name: str) -> None:
    """Save a screenshot to the folder DML_SHOTS, if set."""
    if "DML_SHOTS" in os.environ:
        page.screenshot(path=str(Path(os.environ["DML_SHOTS"]) / f"{name}.png"), full_page=True)


def drop(page: Page, path: Path) -> None:
    data = base64.b64encode(path.read_bytes()).decode()
    page.evaluate(
        """([data, name]) => {
            const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], name));
            for (const kind of ["dragenter", "dragover", "drop"]) {
                const event = new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true });
                document.getElementById("drop").dispatchEvent(event);
            }
        }""",
        [data, path.name],
    )


def fits(page: Page) -> bool:
    """Return whether the page needs no horizontal scrolling."""
    width: Any = page.evaluate("document.documentElement.scrollWidth")
    return bool(width <= page.viewport_size["width"])  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("width", [390, 1280])
def test_an_image_is_chosen_and_dropped_and_what_is_found_is_shown(made: Made, service: Service, browser: Browser, width: int) -> None:
    complaints: list[str] = []
    page = opened(browser, service.url, width, complaints)
    expect(page.locator("#served")).to_contain_text("40 images")
    shoot(page, f"empty-{width}")

    page.set_input_files("#file", made.files[3])
    cards = page.locator("#results li")
    expect(cards).to_have_count(10)
    expect(cards.first).to_contain_text(made.files[3].name)
    expect(cards.first).to_contain_text("class 3")
    expect(cards.first).to_contain_text("1. score 1.000")
    expect(page.locator("#results img")).to_have_count(10)
    assert page.evaluate("[...document.querySelectorAll('img')].every((image) => image.complete && image.naturalWidth > 0)")
    assert fits(page)
    shoot(page, f"found-{width}")

    drop(page, made.files[8])
    expect(cards.first).to_contain_text(made.files[8].name)
    index = Index.open(made.index)
    _, positions = index.search(made.load().embed([made.files[8]]), 10)
    assert [cards.nth(rank).locator(".name").text_content() for rank in range(10)] == [index.item(int(p)).name for p in positions[0]]

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
    assert complaints == []
    page.close()


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
