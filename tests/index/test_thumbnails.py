"""Thumbnails: size, upright orientation, and rejected images."""

import io

import numpy as np
import pytest
from PIL import Image

from dml_core.data.store.decode import decode_rgb
from dml_core.errors import DataError
from dml_core.index.thumbnails import picture_size, thumbnail


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(("size", "expected"), [((640, 320), (160, 80)), ((30, 20), (30, 20)), ((100, 1000), (16, 160))])
def test_the_longer_side_is_bounded_and_nothing_is_enlarged(size: tuple[int, int], expected: tuple[int, int]) -> None:
    small = thumbnail(encoded(Image.new("RGB", size, (200, 30, 40)), "JPEG"), "a.jpg")
    assert opened(small).format == "WEBP"
    assert picture_size(small) == expected
    assert np.abs(np.asarray(opened(small).convert("RGB"), int) - (200, 30, 40)).max() < 8


def test_small_pictures_keep_every_pixel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    small = thumbnail(encoded(Image.fromarray(pixels), "PNG"), "a.png")
    np.testing.assert_array_equal(np.asarray(opened(small).convert("RGB")), pixels)


def test_a_picture_of_a_turned_camera_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # requires a rotation by 90 degrees
    assert picture_size(thumbnail(encoded(Image.new("RGB", (60, 40)), "JPEG", exif=exif), "a.jpg")) == (40, 60)


def test_a_png_of_16_bits_has_the_brightness_that_the_network_sees() -> None:
    grey = np.linspace(0, 65535, 40 * 40).reshape(40, 40).astype(np.uint16)
    data = encoded(Image.fromarray(grey), "PNG")
    small = np.asarray(opened(thumbnail(data, "a.png")).convert("RGB"))
    np.testing.assert_array_equal(small, decode_rgb(data).permute(1, 2, 0).numpy())
    np.testing.assert_array_equal(small[..., 0], grey >> 8)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "I;16", "1", "LA"])
def test_every_kind_of_image_has_a_thumbnail(mode: str) -> None:
    image = Image.new(mode, (200, 100))
    kind = "TIFF" if mode in ("CMYK", "I;16") else "PNG"
    assert picture_size(thumbnail(encoded(image, kind), "a")) == (160, 80)


@pytest.mark.parametrize("mode", ["1", "P", "L"])
def test_thin_lines_of_a_drawing_are_in_its_thumbnail(mode: str) -> None:
    pixels = np.full((1600, 1600), 255, np.uint8)
    pixels[::20] = 0
    small = opened(thumbnail(encoded(Image.fromarray(pixels).convert(mode), "PNG"), "scan.png")).convert("L")
    assert np.asarray(small).mean() == pytest.approx(pixels.mean(), abs=3)


@pytest.mark.parametrize("data", [b"", b"text", encoded(Image.new("RGB", (300, 300), "red"), "PNG")[:200]])
def test_what_is_no_image_is_named(data: bytes) -> None:
    with pytest.raises(DataError, match=r"^birds/x\.png: not an image, damaged"):
        thumbnail(data, "birds/x.png")


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match="too large"):
        thumbnail(encoded(Image.new("RGB", (100, 100)), "PNG"), "x.png")
