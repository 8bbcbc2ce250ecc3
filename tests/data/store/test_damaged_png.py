"""Damaged PNGs are refused: where libpng finds an error in the pixels, torchvision's decoder would crash the process."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_png

from dml_core.data.store.decode import decode_rgb
from tests.forked import forked

GREY = np.random.default_rng(0).integers(0, 256, (13, 21), dtype=np.uint8)
PASSES = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def by_pillow(mode: str) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(GREY.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(GREY).convert("RGB").convert(mode)
    image.save(file, "PNG")
    return file.getvalue()


def with_pixels(data: bytes, size: tuple[int, int] = (21, 13), interlaced: bool = False) -> bytes:
    """Return an 8-bit grey PNG of this compressed data, in two chunks; all checksums of chunks are right."""
    header = struct.pack(">IIBBBBB", *size, 8, 0, 0, 0, interlaced)
    parts = (chunk(b"IDAT", data[:9]), chunk(b"IDAT", data[9:]))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(parts) + chunk(b"IEND", b"")


def interlaced(pixels: np.ndarray) -> bytes:
    rows = [b"\0" + row.tobytes() for left, top, right, down in PASSES for row in pixels[top::down, left::right] if row.size]
    return with_pixels(zlib.compress(b"".join(rows)), pixels.shape[::-1], interlaced=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_png_is_decoded_as_by_torchvision_and_a_damaged_one_is_refused(mode: str) -> None:
    """A byte of the pixels, of their checksum or of the chunk's is changed."""
    data = by_pillow(mode)
    expected = decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
    assert torch.equal(decode_rgb(data), expected if expected.dtype == torch.uint8 else (expected.int() >> 8).to(torch.uint8))
    start, end = data.index(b"IDAT") + 4, data.index(b"IEND") - 4
    for at in range(start, end):
        with pytest.raises(ValueError, match="damaged or truncated"):
            decode_rgb(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])


@pytest.mark.parametrize("shape", [(13, 21), (1, 1), (3, 2), (1, 9), (5, 1)])
def test_an_interlaced_png_is_decoded_and_refused_if_a_row_is_missing(shape: tuple[int, int]) -> None:
    pixels = GREY[: shape[0], : shape[1]]
    data = interlaced(pixels)
    assert np.array_equal(decode_rgb(data)[0].numpy(), pixels)
    with pytest.raises(ValueError, match="damaged or truncated"):
        decode_rgb(with_pixels(zlib.compress(b"\0"), shape[::-1], interlaced=True))


ROWS = b"".join(b"\0" + row.tobytes() for row in GREY)
FORGED = {
    "an unknown filter": zlib.compress(ROWS[:22] + b"\5" + ROWS[23:]),
    "a missing row": zlib.compress(ROWS[:-22]),
    "a missing pixel": zlib.compress(ROWS[:-1]),
    "a wrong checksum": zlib.compress(ROWS)[:-1] + b"\0",
    "no checksum": zlib.compress(ROWS)[:-4],
    "no compressed data": b"not compressed at all",
    "nothing": b"",
}


@pytest.mark.parametrize("name", FORGED)
def test_pixels_that_a_client_forged_are_refused_although_the_chunks_are_right(name: str) -> None:
    assert np.array_equal(decode_rgb(with_pixels(zlib.compress(ROWS)))[0].numpy(), GREY)
    with pytest.raises(ValueError, match="damaged or truncated"):
        decode_rgb(with_pixels(FORGED[name]))


@pytest.mark.parametrize("num_bytes", [1, 1023, 1024, 5000])
def test_bytes_after_the_last_row_are_ignored_as_by_libpng(num_bytes: int) -> None:
    compressed = zlib.compress(ROWS + bytes(num_bytes))
    assert np.array_equal(decode_rgb(with_pixels(compressed))[0].numpy(), GREY)


def test_large_pixels_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dml_core.data.store.decode._PNG_BYTES_AT_ONCE", 50)
    assert np.array_equal(decode_rgb(with_pixels(zlib.compress(ROWS)))[0].numpy(), GREY)
    assert np.array_equal(decode_rgb(interlaced(GREY))[0].numpy(), GREY)


def unchecked(data: bytes) -> None:
    decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def test_the_check_is_still_needed() -> None:
    """Remove it when torchvision refuses such a file by an exception."""
    assert forked(unchecked, with_pixels(zlib.compress(ROWS))) == 0
    assert forked(unchecked, with_pixels(FORGED["an unknown filter"])) < 0
