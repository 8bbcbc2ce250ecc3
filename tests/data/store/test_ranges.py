"""Places of images in `images.arrow`: the bytes there are the images, for every division into record batches."""

import hashlib
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dml_core.data.prepare import pack
from dml_core.data.store.info import IMAGES_FILE
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.ranges import RANGES_FILE, image_ranges, open_ranges
from dml_core.data.store.rows import Manifest, Row
from dml_core.errors import DataError

BUFFER = io.BytesIO()
Image.new("RGB", (2, 2)).save(BUFFER, "JPEG")
JPEG = BUFFER.getvalue()  # decoders ignore what follows it


def pack_sizes(sizes: list[int], folder: Path, num_test: int = 0) -> list[bytes]:
    """Pack images with so many random bytes after the picture, the last ones for testing; return them."""
    images = [JPEG + os.urandom(size) for size in sizes]
    first_test = len(sizes) - num_test
    rows = [Row(str(number), number % 3, str(number % 3), "test" if number >= first_test else "train") for number in range(len(sizes))]
    pack("folder", {}, Manifest(rows, lambda row: images[int(row.path)]), folder)
    return images


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 127, 128, 129, 256, 300]), st.integers(0, 3000), st.randoms(use_true_random=False), st.booleans())
def test_each_range_has_the_bytes_and_the_hash_of_its_image(number: int, largest: int, random: object, has_test: bool) -> None:
    sizes = [random.randint(0, largest) for _ in range(number)]  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        images = pack_sizes(sizes, Path(folder) / "packed", num_test=number // 2 if has_test else 0)
        file = (Path(folder) / "packed" / IMAGES_FILE).read_bytes()
        ranges_N = image_ranges(Path(folder) / "packed")
    assert len(ranges_N) == number
    assert [file[entry["offset"] : entry["offset"] + entry["length"]] for entry in ranges_N] == images
    assert [int(entry["hash"]).to_bytes(8, "little") for entry in ranges_N] == [
        hashlib.blake2b(image, digest_size=8).digest() for image in images
    ]


def test_a_large_image_and_the_order_of_roles(tmp_path: Path) -> None:
    images = pack_sizes([10, 20_000_000, 0, 5], tmp_path / "packed", num_test=2)
    file, ranges_N = (tmp_path / "packed" / IMAGES_FILE).read_bytes(), image_ranges(tmp_path / "packed")
    assert [file[entry["offset"] : entry["offset"] + entry["length"]] for entry in ranges_N] == images
    test = PackedDataset(tmp_path / "packed", "test")
    assert [test.raw_bytes(index) for index in range(2)] == images[2:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: np.save(path, np.arange(4)),
    ],
)
def test_a_file_that_is_not_whole_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    pack_sizes([1, 2, 3], tmp_path / "packed")
    np.save(tmp_path / RANGES_FILE, image_ranges(tmp_path / "packed"))
    assert np.array_equal(open_ranges(tmp_path), image_ranges(tmp_path / "packed"))
    damage(tmp_path / RANGES_FILE)
    with pytest.raises(DataError, match=rf"{RANGES_FILE}: missing, damaged or of another version"):
        open_ranges(tmp_path)
