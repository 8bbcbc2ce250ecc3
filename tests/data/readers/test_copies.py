"""Circulating copies of the published datasets, nested or with files moved, are read like the publisher's own tree.

If files of a copy are missing, a one-line error names them and the download.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torchvision.datasets import StanfordCars

from dml_core.data.drawing.layouts import WRITERS, Picture
from dml_core.data.prepare import prepare
from dml_core.data.readers.synthetic import Synthetic, draw_pictures
from dml_core.data.registry import fetch, materialise, parse_dataset
from dml_core.errors import DataError

CONFIG = Synthetic(num_classes=4, images_per_class=4, image_size=16, seed=5)
LOADERS = {
    "cub200": "cub200",
    "sop": "sop",
    "inshop": "inshop",
    "cars-annos": "cars196",
    "cars-devkit": "cars196",
    "cars-folders": "cars196",
}
OPTIONS = {"published_counts": False}


@pytest.fixture(scope="module")
def pictures() -> list[Picture]:
    return list(draw_pictures(CONFIG))


def move(*pairs: tuple[str, str]) -> Callable[[Path], object]:
    """Return a function that moves paths within a raw folder."""

    def moved(raw: Path) -> None:
        for source, target in pairs:
            (raw / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(raw / source, raw / target)

    return moved


def into(*folders: str) -> Callable[[Path], object]:
    """Return a function that nests the contents of a raw folder in new folders."""

    def nested(raw: Path) -> None:
        inner = raw.with_name("inner")
        raw.rename(inner)
        target = raw.joinpath(*folders)
        target.parent.mkdir(parents=True)
        inner.rename(target)

    return nested


def up(folder: str) -> Callable[[Path], object]:
    """Return a function that replaces a raw folder by one of its folders."""

    def lifted(raw: Path) -> None:
        (raw / folder).rename(raw.with_name("inner"))
        shutil.rmtree(raw)
        raw.with_name("inner").rename(raw)

    return lifted


TORCHVISION = move(("devkit/cars_test_annos_withlabels.mat", "cars_test_annos_withlabels.mat"))
COPIES = {
    "CUB, the raw folder is CUB_200_2011 itself": ("cub200", up("CUB_200_2011")),
    "CUB, the folder twice": ("cub200", into("CUB_200_2011")),
    "CUB, Kaggle's with segmentations beside it": ("cub200", lambda raw: (raw / "segmentations/001.Species_1").mkdir(parents=True)),
    "CUB, two folders around it": ("cub200", into("archive")),
    "Cars, torchvision's stanford_cars": ("cars-devkit", lambda raw: [TORCHVISION(raw), into("stanford_cars")(raw)]),
    "Cars, torchvision's, the raw folder is stanford_cars itself": ("cars-devkit", TORCHVISION),
    "Cars, the publisher's in a folder": ("cars-devkit", into("cars")),
    "Cars, Kaggle's with each folder twice": (
        "cars-devkit",
        lambda raw: [
            TORCHVISION(raw),
            move(*((name, f"x/{name}/{name}") for name in ("cars_train", "cars_test")), ("devkit", "x/car_devkit/devkit"))(raw),
            move(*((f"x/{name}", name) for name in ("cars_train", "cars_test", "car_devkit")))(raw),
        ],
    ),
    "Cars, car_ims twice": ("cars-annos", lambda raw: move(("car_ims", "x/car_ims"), ("x", "car_ims"))(raw)),
    "Cars, car_ims in two folders": ("cars-annos", into("data", "cars")),
    "Cars, class folders once": ("cars-folders", lambda raw: [move(("car_data/car_data", "x"))(raw), move_over(raw)]),
    "SOP, the raw folder is Stanford_Online_Products itself": ("sop", up("Stanford_Online_Products")),
    "SOP, the folder twice": ("sop", into("Stanford_Online_Products")),
    "In-shop, the package's own folder": ("inshop", into("In-shop Clothes Retrieval Benchmark")),
    "In-shop, images beside the lists' folders": ("inshop", move(("Img/img", "img"))),
    "In-shop, both lists in Anno": ("inshop", move(("Eval/list_eval_partition.txt", "Anno/list_eval_partition.txt"))),
    "In-shop, lists beside img": (
        "inshop",
        move(
            ("Eval/list_eval_partition.txt", "list_eval_partition.txt"),
            ("Anno/list_bbox_inshop.txt", "list_bbox_inshop.txt"),
            ("Img/img", "img"),
        ),
    ),
}


def move_over(raw: Path) -> None:
    """Replace `car_data` by `x`."""
    shutil.rmtree(raw / "car_data")
    (raw / "x").rename(raw / "car_data")


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_packs_to_the_same_data_as_the_publishers_tree(copy: str, pictures: list[Picture], tmp_path: Path) -> None:
    layout, rearrange = COPIES[copy]
    for name in ("official", "raw"):
        WRITERS[layout](tmp_path / name, pictures, CONFIG.num_classes)
    rearrange(tmp_path / "raw")
    official, found = (prepare(LOADERS[layout], tmp_path / name, tmp_path / f"{name}-packed", OPTIONS) for name in ("official", "raw"))
    assert found.fingerprint == official.fingerprint


def test_torchvision_reads_the_same_images_and_classes_of_its_own_layout(pictures: list[Picture], tmp_path: Path) -> None:
    WRITERS["cars-devkit"](tmp_path, pictures, CONFIG.num_classes)
    COPIES["Cars, torchvision's stanford_cars"][1](tmp_path)
    manifest = parse_dataset("cars196", OPTIONS).read(tmp_path)
    ours = {manifest.read_bytes(row): row.label - 1 for row in manifest.rows}
    theirs = {}
    for split in ("train", "test"):
        images = StanfordCars(tmp_path, split, loader=lambda path: Path(path).read_bytes())
        theirs |= dict(images[index] for index in range(len(images)))
    assert ours == theirs
    assert len(ours) == len(pictures)


def remove(name: str) -> Callable[[Path], object]:
    return lambda raw: shutil.rmtree(raw / name) if (raw / name).is_dir() else (raw / name).unlink()


LACKING = {
    "Cars without car_ims": ("cars-annos", remove("car_ims"), r"has cars_annos\.mat, and not car_ims; get car_ims\.tgz .md5 d5c8"),
    "Cars whose images lie elsewhere": (
        "cars-annos",
        move(("car_ims", "images")),
        r"has cars_annos\.mat, images/, and not car_ims; get car_ims\.tgz",
    ),
    "Cars with the test annotations that have no labels": (
        "cars-devkit",
        move(("devkit/cars_test_annos_withlabels.mat", "devkit/cars_test_annos.mat")),
        r"and not cars_test_annos_withlabels\.mat; get cars_test_annos_withlabels\.mat .md5 b0a2",
    ),
    "Cars with cars_annos.mat beside the other layout's images": (
        "cars-devkit",
        lambda raw: [remove("devkit")(raw), (raw / "cars_annos.mat").touch()],
        r"has cars_annos\.mat, cars_test/, cars_train/, and not cars_train_annos\.mat, cars_meta\.mat.*; get car_devkit\.tgz",
    ),
    "Cars that are something else": (
        "cub200",
        lambda raw: (raw / "devkit").mkdir(),
        r"has CUB_200_2011/, devkit/, of which none is of C",
    ),
    "CUB without images": ("cub200", remove("CUB_200_2011/images"), r"images: the annotations are there and this folder of images is not"),
    "CUB that is something else": (
        "sop",
        lambda raw: None,
        r"has Stanford_Online_Products/, and neither images\.txt nor classes\.txt; down",
    ),
    "SOP that is something else": (
        "cub200",
        lambda raw: None,
        r"has CUB_200_2011/, and neither Ebay_train\.txt nor Ebay_test\.txt; get St",
    ),
    "In-shop without images": ("inshop", remove("Img"), r"the lists are there and the images are not .Img/img.; unpack img\.zip"),
    "In-shop with the large images": (
        "inshop",
        move(("Img/img", "Img/img_highres")),
        r"large images.* get img\.zip, or set boxes: false",
    ),
    "In-shop that is something else": ("cub200", lambda raw: None, r"has CUB_200_2011/, and neither Eval/list_eval_partition\.txt nor"),
}
WRONG_READERS = {"Cars that": "cars196", "CUB that": "cub200", "SOP that": "sop", "In-shop that": "inshop"}


@pytest.mark.parametrize("copy", LACKING)
def test_a_copy_that_lacks_something_is_named_for_what_it_is(copy: str, pictures: list[Picture], tmp_path: Path) -> None:
    layout, rearrange, message = LACKING[copy]
    WRITERS[layout](tmp_path, pictures, CONFIG.num_classes)
    rearrange(tmp_path)
    reader = next((reader for begins, reader in WRONG_READERS.items() if copy.startswith(begins)), LOADERS[layout])
    with pytest.raises(DataError, match=message) as error:
        parse_dataset(reader, OPTIONS).read(tmp_path)
    assert "\n" not in str(error.value)


def test_the_large_images_of_inshop_are_read_without_boxes(pictures: list[Picture], tmp_path: Path) -> None:
    WRITERS["inshop"](tmp_path, pictures, CONFIG.num_classes)
    move(("Img/img", "Img/img_highres"))(tmp_path)
    manifest = parse_dataset("inshop", OPTIONS | {"boxes": False}).read(tmp_path)
    assert {manifest.read_bytes(row) for row in manifest.rows} == {picture.jpeg for picture in pictures}


def test_two_copies_at_one_level_are_refused(pictures: list[Picture], tmp_path: Path) -> None:
    for name in ("a", "b"):
        WRITERS["cub200"](tmp_path / name, pictures, CONFIG.num_classes)
    with pytest.raises(DataError, match=r"two copies of the dataset, .*a/CUB_200_2011 and .*b/CUB_200_2011; keep one"):
        parse_dataset("cub200", OPTIONS).read(tmp_path)


def test_archives_are_unpacked_where_the_package_lies(pictures: list[Picture], tmp_path: Path) -> None:
    """In-shop's `Img/img.zip`, inside the package's own folder."""
    WRITERS["inshop"](tmp_path, pictures, CONFIG.num_classes)
    shutil.make_archive(str(tmp_path / "Img/img"), "zip", tmp_path / "Img", "img")
    shutil.rmtree(tmp_path / "Img/img")
    into("In-shop Clothes Retrieval Benchmark")(tmp_path)
    materialise("inshop", OPTIONS, tmp_path)
    assert len(parse_dataset("inshop", OPTIONS).read(tmp_path).rows) == len(pictures)


def test_a_nested_copy_is_not_downloaded_again(pictures: list[Picture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dml_core.data.readers.shared.contract.download", lambda *_: pytest.fail("asked the network"))
    WRITERS["cub200"](tmp_path, pictures, CONFIG.num_classes)
    up("CUB_200_2011")(tmp_path)
    fetch("cub200", OPTIONS, tmp_path)
