"""Reading the packed store: original bytes, RGB pixels equal to Pillow's, in any process."""

import io
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dml_core.data.prepare import pack
from dml_core.data.store.decode import decode_rgb
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Manifest, Role, Row
from dml_core.errors import ConfigError, DataError
from tests.forked import CONTEXT


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_bytes_are_the_original_files(packed_synthetic: Path, raw_synthetic: Path) -> None:
    for role in ("train", "test"):
        dataset = PackedDataset(packed_synthetic, role)
        assert len(dataset) == 15
        for index, path in enumerate(dataset.paths):
            assert dataset.raw_bytes(index) == (raw_synthetic / "CUB_200_2011/images" / path).read_bytes()


def test_pixels_equal_pillow_for_colour_and_grayscale(packed_synthetic: Path) -> None:
    dataset = PackedDataset(packed_synthetic, "train")
    modes = set()
    for index in range(len(dataset)):
        picture = Image.open(io.BytesIO(dataset.raw_bytes(index)))
        modes.add(picture.mode)
        assert np.array_equal(dataset.image(index).permute(1, 2, 0).numpy(), np.asarray(picture.convert("RGB")))
    assert modes == {"RGB", "L"}


def test_pixels_are_kept_up_to_a_limit_and_are_the_same_either_way(packed_synthetic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = PackedDataset(packed_synthetic, "train")
    one_image = keeping.image(0).nbytes
    assert keeping.image(0) is keeping.image(np.int64(0))
    monkeypatch.setattr("dml_core.data.store.packed._KEPT_BYTES", 2 * one_image)
    few = PackedDataset(packed_synthetic, "train")
    assert all(torch.equal(few.image(index), keeping.image(index)) for index in range(len(few)))
    assert sum(few.image(index) is few.image(index) for index in range(len(few))) == 2


def test_gray_images_are_kept_as_one_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    gray = [Image.fromarray(rng.integers(0, 256, (28, 28), dtype=np.uint8)) for _ in range(6)]
    nearly_gray = [np.asarray(gray[0].convert("RGB")).copy() for _ in range(3)]
    for channel, pixels in enumerate(nearly_gray):
        pixels[27, 27, channel] ^= 1
    images = [encoded(image, "PNG") for image in [*gray, *map(Image.fromarray, nearly_gray)]]
    rows = [Row(f"{number}.png", 0, "a", "train") for number in range(len(images))]
    pack("folder", {}, Manifest(rows, lambda row: images[int(row.path[0])]), tmp_path / "out")
    monkeypatch.setattr("dml_core.data.store.packed._KEPT_BYTES", 12 * 28 * 28)
    dataset = PackedDataset(tmp_path / "out", "train")
    for _ in range(2):  # decoded, then kept
        for number, data in enumerate(images):
            assert torch.equal(dataset.image(number), decode_rgb(data))
    is_kept = [dataset.image(number) is dataset.image(number) for number in range(len(images))]
    assert is_kept == [True] * 8 + [False], "six of one channel and two of three fill twelve channels"


def test_labels_are_local_to_the_role_and_keep_their_names(packed_synthetic: Path) -> None:
    test = PackedDataset(packed_synthetic, "test")
    assert test.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert test.labels.dtype == np.int64
    assert test.class_names == ["004.Species_4", "005.Species_5", "006.Species_6"]
    assert all(path.startswith(test.class_names[label]) for path, label in zip(test.paths, test.labels, strict=True))


def test_query_and_gallery_share_class_indices(tmp_path: Path) -> None:
    """A gallery may have classes without queries; a class must have the same index in queries and gallery."""
    data = encoded(Image.new("RGB", (4, 4)), "PNG")
    listed: list[tuple[str, Role]] = [("a", "train"), ("a", "train"), ("b", "gallery"), ("c", "gallery"), ("c", "query"), ("d", "gallery")]
    rows = [Row(f"{n}.png", ord(name), name, role) for n, (name, role) in enumerate(listed)]
    pack("folder", {}, Manifest(rows, lambda _: data), tmp_path / "out")
    query, gallery = (PackedDataset(tmp_path / "out", role) for role in ("query", "gallery"))
    assert query.labels.tolist() == [1]
    assert gallery.labels.tolist() == [0, 1, 2]
    assert query.class_names == gallery.class_names == ["b", "c", "d"]


@pytest.mark.slow
def test_pickles_small_and_reads_in_a_process_that_inherits_nothing(packed_synthetic: Path) -> None:
    dataset = PackedDataset(packed_synthetic, "train")
    image = dataset.image(3)
    assert len(pickle.dumps(dataset)) < 1000, "the images do not travel"
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        assert torch.equal(pool.submit(dataset.image, 3).result(), image)


def test_unknown_role_and_missing_store(packed_synthetic: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no role 'gallery'"):
        PackedDataset(packed_synthetic, "gallery")
    with pytest.raises(DataError, match="no prepared dataset"):
        PackedDataset(tmp_path, "train")


@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "JPEG"), ("L", "PNG"), ("P", "PNG"), ("RGB", "BMP"), ("P", "GIF")]
)
def test_every_kind_decodes_as_pillow_does(mode: str, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise).resize((20, 30)).convert(mode), kind)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decode_rgb(data).permute(1, 2, 0).numpy(), expected)


def test_alpha_is_dropped() -> None:
    data = encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 0)), "PNG")
    assert decode_rgb(data)[:, 0, 0].tolist() == [10, 20, 30]


def test_deep_pixels_keep_their_high_byte_or_are_refused() -> None:
    """Pillow would silently clip them at 255."""
    deep = Image.fromarray(np.array([[0, 255, 256, 40_000, 65_535]], dtype=np.uint16))
    assert decode_rgb(encoded(deep, "PNG")).tolist() == [[[0, 0, 1, 156, 255]]] * 3
    with pytest.raises(ValueError, match="more than 8 bits"):
        decode_rgb(encoded(deep, "TIFF"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP"])
def test_half_an_image_is_refused(kind: str) -> None:
    data = encoded(Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)), kind)
    with pytest.raises(ValueError, match="damaged"):
        decode_rgb(data[: len(data) // 2])
