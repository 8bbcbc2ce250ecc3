"""Encoded pictures of a page: kept while nothing that they depend on changes, and encoded again if anything does."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.reports import pictures
from tasks.reports.pictures import Encoded, PictureCache, encode
from tasks.sealed import FORMAT
from tests.damage import DAMAGE, as_format

ROOM = 40_000


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the pictures that are encoded."""
    encodings: list[int] = []

    def counted(data: bytes, most_bytes: int) -> Encoded:
        encodings.append(most_bytes)
        return encode(data, most_bytes)

    monkeypatch.setattr(pictures, "encode", counted)
    pictures._encoder.cache_clear()
    return encodings


def write_page(path: Path, *images: bytes, room: int = ROOM) -> list[Encoded]:
    pictures = PictureCache(path)
    encoded = [pictures.encode(image, room) for image in images]
    pictures.save()
    return encoded


def test_a_picture_damaged_in_any_way_is_omitted() -> None:
    data = bytearray(png(1))
    data[data.rindex(b"IDAT") + 2] ^= 0x20  # Pillow calls a broken chunk a syntax error
    assert encode(bytes(data), ROOM) == Encoded(source=None)


def test_what_has_not_changed_is_not_encoded_again(tmp_path: Path, encodings: list[int]) -> None:
    first = write_page(tmp_path / "page.json", png(1), png(2), png(1), b"no picture")
    assert len(encodings) == 3, "two are the same"
    again = write_page(tmp_path / "page.json", png(1), png(2), png(1), b"no picture")
    assert len(encodings) == 3
    assert first == again == [*(encode(png(seed), ROOM) for seed in (1, 2, 1)), Encoded(source=None)]
    assert first[0].source is not None
    assert (first[0].width, first[0].height) == (80, 60)


def test_less_room_encodes_only_what_does_not_fit_any_more(tmp_path: Path, encodings: list[int]) -> None:
    """A new line of a table leaves each picture of its page a little less."""
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8)).save(large := io.BytesIO(), "PNG")
    for room, num in ((92_000, 2), (91_500, 2), (90_000, 3), (89_000, 3), (1_000, 5), (92_000, 7)):
        page = write_page(tmp_path / "page.json", png(1), large.getvalue(), room=room)
        assert len(encodings) == num, room
        assert page == [encode(image, room) for image in (png(1), large.getvalue())]


def _source(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pictures.py").write_bytes(Path(pictures.__file__).read_bytes() + b"# edited\n")
    patch.setattr(pictures, "__file__", str(tmp_path / "pictures.py"))


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path], object]] = {
    "this module": _source,
    "Pillow": lambda patch, _: patch.setattr(Image, "__version__", "99.0"),
    "libwebp": lambda patch, _: patch.setattr(pictures.features, "version", lambda name: "99.0"),
}


@pytest.mark.parametrize("changed", [*CHANGES, "room", "picture"])
def test_a_change_of_anything_that_it_depends_on_encodes_it_again(
    changed: str, tmp_path: Path, encodings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_page(tmp_path / "page.json", png(1), png(2))
    if changed in CHANGES:
        CHANGES[changed](monkeypatch, tmp_path)
        pictures._encoder.cache_clear()
    image, room = png(3) if changed == "picture" else png(1), 2_000 if changed == "room" else ROOM
    (encoded,) = write_page(tmp_path / "page.json", image, room=room)
    assert len(encodings) == 3
    assert encoded == encode(image, room)
    assert len((encoded.source or "").encode()) * 3 / 4 <= room
    pictures._encoder.cache_clear()


def test_only_the_pictures_of_the_page_are_kept(tmp_path: Path, encodings: list[int]) -> None:
    write_page(tmp_path / "page.json", png(1), png(2))
    before = (tmp_path / "page.json").stat().st_size
    write_page(tmp_path / "page.json", png(2))
    assert len(encodings) == 2
    assert (tmp_path / "page.json").stat().st_size < 0.6 * before
    write_page(tmp_path / "page.json", png(1), png(2))
    assert len(encodings) == 3


@pytest.mark.parametrize("how", [*DAMAGE, "newer"])
def test_a_damaged_file_changes_no_page(how: str, tmp_path: Path, encodings: list[int]) -> None:
    path = tmp_path / "page.json"
    first = write_page(path, png(1))
    if how == "newer":
        path.write_text(as_format(path.read_text(), FORMAT + 1))
    else:
        DAMAGE[how](path)
    newer = path.read_bytes() if how == "newer" else None
    assert write_page(path, png(1)) == first
    assert len(encodings) == 2
    assert newer is None or path.read_bytes() == newer, "a newer version's file stays"
    (tmp_path / "file").touch()
    assert write_page(tmp_path / "file" / "page.json", png(1)) == first
