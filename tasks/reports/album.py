"""Sheets of many thumbnails: a page of thousands of images would otherwise be thousands of files, loaded one by one.

A sheet has COLUMNS columns of square cells. The cells are as large as the sheet's share of the album's bytes allows, and never larger than
the images; a page addresses a cell by percentages, and does not need its size.
"""

import io
from math import ceil
from pathlib import Path

from PIL import Image

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.figures.gallery import scaled

COLUMNS = 20
CELLS = COLUMNS * COLUMNS
LADDER = ((160, 80), (112, 76), (80, 72), (64, 70), (48, 66), (32, 55), (24, 40), (16, 20))  # (pixels of a cell, quality), the best first
SMALL = 64  # pixels


class Album:
    """Images by their place; adding an image again returns the same place. File names begin with `stem`; `most_bytes` is for all sheets."""

    def __init__(self, stem: str, most_bytes: int) -> None:
        self.stem, self.most_bytes = stem, most_bytes
        self._places: dict[tuple[str, int], int] = {}
        self.images: list[tuple[EmbeddedImages, int]] = []  # by their place

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_sheets(self) -> int:
        """Number of its files."""
        return ceil(len(self) / CELLS)

    @property
    def is_small(self) -> bool:
        """True if its images (judged by the first) are so small that their pixels are better shown as squares."""
        return len(self) > 0 and max(self.images[0][0].image(self.images[0][1]).size) <= SMALL

    def place(self, side: EmbeddedImages, index: int) -> int:
        """Return the place of an image, adding it if it is new."""
        key = (side.role, int(index))
        if key not in self._places:
            self._places[key] = len(self.images)
            self.images.append((side, int(index)))
        return self._places[key]

    def style(self, place: int) -> str:
        """Return the CSS that shows a place's cell as the background of an element."""
        sheet, cell = divmod(place, CELLS)
        row, column = divmod(cell, COLUMNS)
        num_rows = min(COLUMNS, ceil((len(self) - sheet * CELLS) / COLUMNS))
        across, down = (100 * at / max(count - 1, 1) for at, count in ((column, COLUMNS), (row, num_rows)))
        return (
            f"background-image:url({self.stem}-{sheet:03}.webp);background-size:{100 * COLUMNS}% {100 * num_rows}%;"
            f"background-position:{across:.4f}% {down:.4f}%"
        )

    def write(self, folder: Path) -> None:
        """Write all sheets, each within its share of the bytes."""
        rung = 0
        for sheet in range(self.num_sheets):
            images = [side.image(index) for side, index in self.images[sheet * CELLS : (sheet + 1) * CELLS]]
            largest = max(max(image.size) for image in images)
            thumbnails = [_reduced(image, min(LADDER[0][0], largest)) for image in images]
            data, rung = _encoded(thumbnails, self.most_bytes // self.num_sheets, rung)
            (folder / f"{self.stem}-{sheet:03}.webp").write_bytes(data)


def _reduced(image: Image.Image, edge: int) -> Image.Image:
    """Return the image in RGB, no side longer than `edge`."""
    image = image.convert("RGB")
    return image if max(image.size) <= edge else scaled(image, edge)


def _encoded(thumbnails: list[Image.Image], most_bytes: int, first: int) -> tuple[bytes, int]:
    """Encode a sheet with the first rung from `first` on that fits the bytes, else the last; return its bytes and the rung."""
    largest = max(max(image.size) for image in thumbnails)
    num_rows = ceil(len(thumbnails) / COLUMNS)
    for rung in range(first, len(LADDER)):
        pixels, quality = LADDER[rung]
        edge = min(pixels, largest)
        sheet = Image.new("RGB", (COLUMNS * edge, num_rows * edge), "white")
        for cell, image in enumerate(thumbnails):
            row, column = divmod(cell, COLUMNS)
            small = _reduced(image, edge)
            sheet.paste(small, (column * edge + (edge - small.width) // 2, row * edge + (edge - small.height) // 2))
        file = io.BytesIO()
        sheet.save(file, "WEBP", quality=quality, method=2)
        if file.tell() <= most_bytes:
            break
    return file.getvalue(), rung
