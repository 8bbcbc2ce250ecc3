"""Sheets of thumbnails: every picture is where the page expects it, and a sheet keeps to its byte limit."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dml_core.data.store.embedded import EmbeddedImages
from tasks.reports.album import CELLS, COLUMNS, Album


class Drawn:
    """Generated images with a packed dataset's interface."""

    role = "test"

    def __init__(self, size: int, noise: bool = False) -> None:
        self.size, self.noise = size, noise

    def image(self, index: int) -> torch.Tensor:
        generator = np.random.default_rng(index)
        if self.noise:
            return torch.from_numpy(generator.integers(0, 256, (3, self.size, self.size), dtype=np.uint8))
        return torch.from_numpy(generator.integers(0, 256, 3, dtype=np.uint8)).view(3, 1, 1).expand(3, self.size, self.size).contiguous()


def side(size: int = 24, noise: bool = False) -> EmbeddedImages:
    return EmbeddedImages("test", Drawn(size, noise), np.zeros((1, 1)), np.zeros(1, dtype=np.int64))  # type: ignore[arg-type]


def shown(album: Album, place: int, folder: Path) -> Image.Image:
    """Return what a browser shows of a place: the part of the sheet that its CSS style puts in a square element."""
    found = re.fullmatch(
        r"background-image:url\((.+)\);background-size:(\d+)% (\d+)%;background-position:([\d.]+)% ([\d.]+)%", album.style(place)
    )
    assert found is not None
    name, *figures = found.groups()
    with Image.open(folder / name) as sheet:
        columns, rows, across, down = (float(figure) / 100 for figure in figures)
        width, height = sheet.width / columns, sheet.height / rows
        left, top = across * (sheet.width - width), down * (sheet.height - height)
        return sheet.convert("RGB").crop((round(left), round(top), round(left + width), round(top + height)))


@pytest.mark.parametrize("num_images", [1, COLUMNS, COLUMNS + 1, CELLS, CELLS + 3])
def test_every_picture_is_where_its_style_points(num_images: int, tmp_path: Path) -> None:
    album, images = Album("x", 10_000_000), side()
    places = [album.place(images, index) for index in range(num_images)]
    assert places == list(range(num_images)) == [album.place(images, index) for index in range(num_images)]
    album.write(tmp_path)
    assert len(list(tmp_path.iterdir())) == album.num_sheets == -(-num_images // CELLS)
    for place in {0, num_images // 2, num_images - 1}:
        wanted = images.dataset.image(place)[:, 0, 0].numpy().astype(int)
        got = np.asarray(shown(album, place, tmp_path)).astype(int)
        assert np.abs(got[6:-6, 6:-6].mean(axis=(0, 1)) - wanted).max() < 16, place  # WebP halves the resolution of colours


def test_sheets_of_noise_keep_to_their_bytes_and_plain_ones_keep_their_size(tmp_path: Path) -> None:
    for name, noise, most in (("noise", True, 60_000), ("plain", False, 60_000)):
        album, images = Album(name, most), side(96, noise)
        for index in range(60):
            album.place(images, index)
        album.write(tmp_path)
        assert sum(path.stat().st_size for path in tmp_path.glob(f"{name}-*")) <= most
    with Image.open(tmp_path / "noise-000.webp") as noisy, Image.open(tmp_path / "plain-000.webp") as plain:
        assert noisy.width < plain.width == 96 * COLUMNS


def test_small_images_are_not_enlarged(tmp_path: Path) -> None:
    album, images = Album("small", 10_000_000), side(24)
    album.place(images, 0)
    assert album.is_small
    album.write(tmp_path)
    with Image.open(tmp_path / "small-000.webp") as sheet:
        assert sheet.size == (24 * COLUMNS, 24)
