"""Decoding: orientation compared with Pillow's, only for a user's own images, and rejection of images that would take gigabytes."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from dml_core.data.prepare import pack
from dml_core.data.registry import DATASETS, dataset_class
from dml_core.data.store.decode import ORIENTATION_TAG, decode_rgb, decode_upright, for_nvjpeg
from dml_core.data.store.info import OWN_READERS
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.resized import resized
from dml_core.data.store.rows import Manifest, Row
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import DataError
from dml_core.index.thumbnails import picture_size, thumbnail
from dml_core.network_description import NetworkDescription
from dml_core.trained import TrainedModel

FORMATS = ["JPEG", "PNG", "WEBP", "TIFF"]
TURNS = range(1, 9)
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)


def photograph(kind: str, turn: int | None, pixels: np.ndarray = PIXELS, **options: object) -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    if turn is not None:
        exif[ORIENTATION_TAG] = turn
    Image.fromarray(pixels).save(file, kind, exif=exif, **options)
    return file.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def pixels_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("turn", [*TURNS, None, 0, 9])
def test_upright_is_as_pillow_turns_it_and_stored_is_as_stored(kind: str, turn: int | None) -> None:
    data = photograph(kind, turn)
    np.testing.assert_array_equal(pixels_of(decode_upright(data)), by_pillow(data))
    assert decode_upright(data).is_contiguous()
    if kind != "TIFF":  # Pillow turns TIFF automatically
        np.testing.assert_array_equal(pixels_of(decode_rgb(data)), pixels_of(decode_rgb(photograph(kind, None))))


def oriented_pngs() -> dict[str, bytes]:
    """Return PNGs with an orientation at each place where Pillow finds one: a chunk before or after the pixels, and two texts."""
    turned = photograph("PNG", 6)
    start, end = turned.index(b"eXIf") - 4, turned.index(b"IDAT") - 4
    exif = turned[start + 8 : end - 4]
    profile = f"\nexif\n{len(exif) + 6:8d}\n{(b'Exif' + bytes(2) + exif).hex()}\n"
    found = {"before": turned, "after": turned[:start] + turned[end:-12] + turned[start:end] + turned[-12:]}
    for is_compressed in (False, True):
        for key, text in (("Raw profile type exif", profile), ("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')):
            info = PngInfo()
            info.add_itxt(key, text, zip=is_compressed)
            found[f"{key} {is_compressed}"] = photograph("PNG", None, pnginfo=info)
    return found


@pytest.mark.parametrize("place", oriented_pngs())
def test_an_orientation_anywhere_in_a_png_is_found(place: str) -> None:
    data = oriented_pngs()[place]
    np.testing.assert_array_equal(pixels_of(decode_upright(data)), np.rot90(PIXELS, -1))
    np.testing.assert_array_equal(by_pillow(data), np.rot90(PIXELS, -1))


def test_a_png_without_orientation_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would decode all of it to look for a chunk after the pixels."""
    monkeypatch.setattr("PIL.Image.open", lambda *_: pytest.fail("opened"))
    np.testing.assert_array_equal(pixels_of(decode_upright(photograph("PNG", None))), PIXELS)


@pytest.mark.parametrize("reader", ["folder", "manifest", "cub200", "sop", "synthetic"])
def test_own_images_are_upright_wherever_they_are_seen_and_official_ones_as_stored(reader: str, tmp_path: Path) -> None:
    files = {f"{turn}.png": photograph("PNG", turn) for turn in TURNS}
    rows = [Row(name, number % 2, f"class {number % 2}", "train") for number, name in enumerate(files)]
    manifest = Manifest(rows, lambda row: files[row.path])
    pack(reader, {}, manifest, tmp_path / "packed")
    dataset = PackedDataset(tmp_path / "packed", "train")
    is_own = reader in ("folder", "manifest")
    for number, data in enumerate(files.values()):
        expected = by_pillow(data) if is_own else PIXELS
        np.testing.assert_array_equal(pixels_of(dataset.image(number)), expected)
        assert dataset.raw_bytes(number) == data
        if is_own:  # the index's thumbnail has the same orientation and, at this size, every pixel
            assert picture_size(thumbnail(data, "x")) == (expected.shape[1], expected.shape[0])
            np.testing.assert_array_equal(by_pillow(thumbnail(data, "x")), expected)
    small = resized(manifest, (12, 20), "bilinear", is_own)
    sizes = {pixels_of(decode_rgb(small.read_bytes(row))).shape for row in rows}
    assert sizes == {(12, 20, 3)}
    turned = [pixels_of(decode_rgb(small.read_bytes(row))) for row in rows]
    assert all(np.array_equal(turned[0], other) for other in turned[1:]) != is_own


def test_which_readers_are_of_own_images_is_said_once() -> None:
    assert {name for name in DATASETS if dataset_class(name).own_images} == OWN_READERS


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_orientation_leaves_the_pixels(changes: list[tuple[int, int]]) -> None:
    """With any bytes in the EXIF segment, the image keeps its pixels, turned or not."""
    data = bytearray(photograph("JPEG", 6))
    start = data.index(b"Exif") + 6
    length = min(200, int.from_bytes(data[start - 8 : start - 6]) - 9)
    for at, value in changes:
        data[start + at % length] = value
    stored = decode_rgb(bytes(data))
    found = decode_upright(bytes(data))
    assert any(torch.equal(found, view) for view in all_turns(stored))


def all_turns(pixels: torch.Tensor) -> list[torch.Tensor]:
    return [torch.rot90(side, k, (1, 2)) for side in (pixels, pixels.flip(2)) for k in range(4)]


def png_with_text(text: str, *, is_damaged: bool) -> bytes:
    file, info = io.BytesIO(), PngInfo()
    info.add_text("comment", text, zip=not is_damaged)
    Image.fromarray(PIXELS).save(file, "PNG", pnginfo=info)
    return file.getvalue().replace(b"comment", b"commend") if is_damaged else file.getvalue()


METADATA = {
    "text with a wrong checksum": png_with_text("text", is_damaged=True),
    "text that is too long": png_with_text("x" * 3_000_000, is_damaged=False),
    "a short JFIF header": b"\xff\xd8\xff\xe0\0\7JFIF\0" + photograph("JPEG", None)[20:],
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_only_pillow_refuses_leave_the_pixels(name: str) -> None:
    """Packing accepts such an image, so training, an index and search must read it."""
    data = METADATA[name]
    with pytest.raises((OSError, ValueError)):
        by_pillow(data)
    assert torch.equal(decode_upright(data), decode_rgb(data))
    assert np.array_equal(by_pillow(thumbnail(data, "a")), pixels_of(decode_rgb(data)))


# ---------------------------------------------------------------- too large, too long, too short


def png_of(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size; its data are never read."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def jpeg_of(width: int, height: int, **options: object) -> bytes:
    data = bytearray(photograph("JPEG", 3, **options))
    at = data.index(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def decoy_jpeg_of(width: int, height: int, marker: int) -> bytes:
    """Return a JPEG with a marker that has no length before its comments; one of them contains a small frame."""
    comments = bytearray(2 * (b"\xff\xfe" + struct.pack(">H", 0xFFF0) + bytes(0xFFF0 - 2)))
    start = 0xFFFE  # where a reader arrives that takes the first comment's marker for a length
    comments[start : start + 10] = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, 16, 16, 1)
    return b"\xff\xd8\xff" + bytes([marker]) + bytes(comments) + jpeg_of(width, height)[2:]


def gif_of(width: int, height: int) -> bytes:
    data = bytearray(photograph("GIF", None))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


BOMBS = {
    "png": png_of(30_000, 30_000),
    "jpeg": jpeg_of(65_000, 65_000),
    "progressive jpeg": jpeg_of(65_000, 65_000, progressive=True),
    "jpeg with rubbish between its segments": b"\xff\xd8\0\0" + jpeg_of(65_000, 65_000)[2:],
    **{f"jpeg with a decoy after {marker:02x}": decoy_jpeg_of(65_000, 65_000, marker) for marker in (0x00, 0x01, 0xD0, 0xD9)},
    "gif": gif_of(65_000, 65_000),
    "long png": png_of(1, 60_000),
    "long jpeg": jpeg_of(60_000, 3),
    "no height": png_of(40, 0),
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_image_that_would_take_gigabytes_is_refused_by_its_header(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for decoder in ("decode_png", "decode_jpeg"):
        monkeypatch.setattr(f"dml_core.data.store.decode.{decoder}", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=r"^(of [^\n]* pixels|not an image)[^\n]*$"):
        decode_rgb(BOMBS[name])


@pytest.mark.parametrize("own_image", [False, True])
@pytest.mark.parametrize("name", BOMBS)
def test_what_is_refused_is_not_sent_to_a_device(name: str, own_image: bool) -> None:
    assert for_nvjpeg(BOMBS[name], own_image) is None


@pytest.mark.parametrize(("place", "values"), [(1, (0xC2, 0xC0, 0xC3, 0xC9, 0xCA)), (4, (8, 12)), (9, (3, 1, 2, 4))])
def test_only_jpegs_of_nvjpeg_s_kinds_are_sent_to_a_device(place: int, values: tuple[int, ...]) -> None:
    """By the frame header: Huffman codes (C0 to C2), 8 bits, one or three components."""
    data = bytearray(photograph("JPEG", 6))
    at = data.index(b"\xff\xc0")
    sent = []
    for value in values:
        data[at + place] = value
        found = for_nvjpeg(bytes(data), own_image=False)
        assert found is None or (found[0].numpy().tobytes(), found[1]) == (data, 1)
        sent.append(found is not None)
    assert sent == [value in {1: (0xC0, 0xC2), 4: (8,), 9: (1, 3)}[place] for value in values]


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"comment": b"\xff\xc0 no frame" * 30}, {"icc_profile": b"\xff" * 70_000}])
def test_a_jpeg_s_size_is_read_from_its_frame(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is not read from frame-like bytes in other segments; the smallest limit that accepts the image is its own size."""
    data = photograph("JPEG", 1, **options)
    filled = data.replace(b"\xff\xdb", b"\xff\xff\xff\xdb", 1)  # fill bytes, allowed before a marker
    at = data.rindex(b"\xff\xc4")  # a Huffman table, allowed before the frame, has a marker code between those of frames
    end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
    tables_first = data[:2] + data[at:end] + data[2:] if not options else data
    monkeypatch.setattr("dml_core.data.store.decode.MOST_PIXELS", 24 * 40)
    for whole in (data, filled, tables_first):
        assert decode_rgb(whole).shape == (3, 24, 40)
    monkeypatch.setattr("dml_core.data.store.decode.MOST_PIXELS", 24 * 40 - 1)
    for whole in (data, filled, tables_first):
        with pytest.raises(ValueError, match="of 40 x 24 pixels, more than 959"):
            decode_rgb(whole)


STRIP_OFFSETS = struct.pack("<HH", 273, 4)  # a tag of TIFF and its type


@pytest.mark.parametrize("kind", [2, 5, 7, 12])
def test_a_damaged_tag_that_leads_pillow_to_any_error_is_refused(kind: int) -> None:
    """Text, a ratio, bytes or a float where Pillow expects an integer."""
    whole = photograph("TIFF", None)
    damaged = whole.replace(STRIP_OFFSETS, struct.pack("<HH", 273, kind))
    assert damaged != whole
    for decode in (decode_rgb, decode_upright):
        with pytest.raises(ValueError, match=r"^not an image, or damaged$"):
            decode(damaged)
    with pytest.raises(DataError, match="a: not an image, damaged"):
        thumbnail(damaged, "a")
    model = TrainedModel(
        NetworkDescription.model_construct(transform=TransformConfig(), embedding_dim=1), "", lambda views: np.zeros((len(views), 1))
    )
    with pytest.raises(DataError, match="a: cannot be decoded"):
        model.view(Image.open(io.BytesIO(damaged)), name="a")


@pytest.mark.parametrize("kind", [*FORMATS, "GIF", "BMP"])
def test_an_image_cut_anywhere_is_refused(kind: str) -> None:
    data = photograph(kind, 6)
    for end in {*range(0, len(data) - 200, max(1, len(data) // 40)), len(data) // 2}:
        for decode in (decode_rgb, decode_upright):
            with pytest.raises(ValueError, match=r"^[^\n]+$"):
                decode(data[:end])
