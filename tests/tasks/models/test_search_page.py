"""The page of search results in headless Chromium, as wide as a phone and a desktop: keyboard, names with markup, no clipped content."""

import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from dml_core.index.index import Index
from dml_core.index.items import Item
from dml_core.index.thumbnails import thumbnail
from dml_core.index.writing import Batch, build_index
from tasks.models.searching import Answer, Hit, search_page

CHROMIUM = shutil.which("chromium")
NAMES = [
    "a/plain.jpg",
    "<script>alert(1)</script>.jpg",
    '"><img src=x onerror=alert(2)>.jpg',
    f"{'long' * 40}.jpg",
    "ü 図.jpg",
    "f.jpg",
    "g.jpg",
]
CLASSES = [None, "<b>bold</b>", "a class of a very long name that has to be wrapped", "x" * 60, "d", "e", "f"]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    items = [Item(name, class_name, picture(place)) for place, (name, class_name) in enumerate(zip(NAMES, CLASSES, strict=True))]
    items[5] = items[5]._replace(thumbnail=None)
    rows = np.random.default_rng(0).standard_normal((len(items), 8)).astype(np.float32)
    index: Index = build_index(folder / "index", [Batch(rows, items)], "0" * 32)
    hits = [Hit(rank, 1 - 0.2 * rank, item) for rank, item in enumerate(items, start=1)]
    answers = [Answer(f"queries/{name}", picture(place), hits) for place, name in enumerate(NAMES[:3])]
    (folder / "page.html").write_text(search_page(index, answers))
    return folder / "page.html"


def picture(place: int) -> bytes:
    size = [(400, 300), (24, 24), (100, 500)][place % 3]
    pixels = np.random.default_rng(place).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return thumbnail(file.getvalue(), "drawn")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("Debian's chromium is not installed")
    with sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_it_is_used_by_keyboard_and_nothing_is_cut_off_or_run(browser: Any, page_file: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("dialog", lambda dialog: (told.append("a dialog"), dialog.dismiss()))
    page.on("request", lambda request: told.append(request.url) if request.url.startswith("http") else None)
    page.goto(page_file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("section").count() == 3
    assert page.locator("section >> nth=0").locator("li").count() == 7
    assert page.locator("img").evaluate_all("all => all.every(one => one.hasAttribute('alt'))")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To what was found"
    page.locator("#query-1 ol button").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("dialog").is_visible()
    assert "a/plain.jpg" in page.locator("dialog figure >> nth=1").inner_text()
    page.keyboard.press("ArrowRight")
    assert NAMES[1] in page.locator("dialog figure >> nth=1").inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert "g.jpg" in page.locator("dialog figure >> nth=1").inner_text()
    page.keyboard.press("ArrowLeft")  # the one without a picture
    assert page.locator("#right").get_attribute("alt") == "no picture kept"
    assert page.locator("dialog").bounding_box()["width"] <= width
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    expect(page.locator(":focus")).to_have_attribute("aria-label", re.compile("f.jpg"))  # the focus returns to the image that was opened
    page.locator("#query-2 ol button").nth(2).click()
    assert page.locator("dialog").is_visible()
    page.locator("#close").click()
    assert told == []
    page.close()
