"""`synthetic`, the embedded dataset: drawn pictures in CUB-200-2011's official layout, so that the real loader is what runs.

The first half of the classes trains, the second half tests, as in CUB. The generator plants a classification split in
`train_test_split.txt`, which mixes every class over both parts and must not be read.
"""

import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image
from pydantic import Field

from dml_core.data.contract import Box, DatasetConfig, Row
from dml_core.data.cub200 import FOLDER, Cub200
from dml_core.data.drawing import Pose, Species, draw_picture, draw_pose, draw_species
from dml_core.errors import DataError

STAMP_FILE = "generator.json"
_JPEG_QUALITY = 92


class SyntheticConfig(DatasetConfig):
    """What is drawn; the same configuration gives the same bytes.

    Attributes:
        num_classes: the first half trains, the rest tests.
        images_per_class: pictures of each class.
        image_size: side in pixels.
        num_modes: poses, shared by all classes; a picture shows one of them.
        difficulty: 0 to 1, strength of every nuisance (place, rotation, light, clutter).
        grayscale_share: share of the pictures that are stored without colour.
        seed: of everything that is drawn.
    """

    num_classes: int = Field(default=40, ge=2)
    images_per_class: int = Field(default=50, ge=2)
    image_size: int = Field(default=48, ge=8)
    num_modes: int = Field(default=4, ge=1)
    difficulty: float = Field(default=0.6, ge=0.0, le=1.0)
    grayscale_share: float = Field(default=0.02, ge=0.0, le=1.0)
    seed: int = Field(default=0, ge=0)


class Synthetic(SyntheticConfig):
    """The dataset made by `generate`, read by the loader of the layout that it is written in."""

    how_to_get: ClassVar[str] = "it is generated; run `dml data fetch synthetic`"

    def rows(self, raw: Path) -> list[Row]:
        """As the CUB loader reads them; the published counts are CUB's, not this tree's."""
        return Cub200(published_counts=False).rows(raw)

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """As the CUB loader."""
        return Cub200(published_counts=False).reader(raw)

    def materialise(self, raw: Path) -> None:
        """Generate unless `raw` holds what this very configuration generates; a generated tree of another one is replaced.

        Raises:
            DataError: `raw` holds files that the generator did not write.
        """
        stamp, wanted = raw / STAMP_FILE, self.model_dump_json(indent=2) + "\n"
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            return
        if raw.is_dir() and any(raw.iterdir()) and not stamp.is_file():
            raise DataError(f"{raw}: holds files that the generator did not write; move them or choose another folder")
        partial = raw.parent / f".{raw.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        generate(self, partial)
        (partial / STAMP_FILE).write_text(wanted, encoding="utf-8")
        shutil.rmtree(raw, ignore_errors=True)
        partial.rename(raw)


@dataclass(frozen=True)
class Picture:
    """One drawn image: its class (from 0), number within the class (from 0), JPEG bytes and the creature's box."""

    class_index: int
    number: int
    jpeg: bytes
    box: Box


def draw_pictures(config: SyntheticConfig) -> Iterator[Picture]:
    """All pictures, class by class. Each has a random stream of its own: a picture does not depend on how many others there are."""
    poses = [draw_pose(_stream(config.seed, 0, mode)) for mode in range(config.num_modes)]
    for class_index in range(config.num_classes):
        species = draw_species(_stream(config.seed, 1, class_index))
        for number in range(config.images_per_class):
            yield _draw(config, species, poses, class_index, number)


def generate(config: SyntheticConfig, folder: Path) -> None:
    """Write the dataset in CUB's official layout under `folder`, which must not hold one yet."""
    root = folder / FOLDER
    (root / "images").mkdir(parents=True)
    names = [f"{index + 1:03d}.Species_{index + 1}" for index in range(config.num_classes)]
    for name in names:
        (root / "images" / name).mkdir()
    tables: dict[str, list[str]] = {name: [] for name in ("images", "image_class_labels", "bounding_boxes", "train_test_split")}
    for image, picture in enumerate(draw_pictures(config), start=1):
        path = f"{names[picture.class_index]}/Species_{picture.class_index + 1}_{picture.number + 1:04d}.jpg"
        (root / "images" / path).write_bytes(picture.jpeg)
        left, top, right, bottom = picture.box
        tables["images"].append(f"{image} {path}")
        tables["image_class_labels"].append(f"{image} {picture.class_index + 1}")
        tables["bounding_boxes"].append(f"{image} {left:.1f} {top:.1f} {right - left:.1f} {bottom - top:.1f}")
        tables["train_test_split"].append(f"{image} {picture.number % 2}")
    tables["classes"] = [f"{index + 1} {name}" for index, name in enumerate(names)]
    for table, lines in tables.items():
        (root / f"{table}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _draw(config: SyntheticConfig, species: Species, poses: list[Pose], class_index: int, number: int) -> Picture:
    rng = _stream(config.seed, 2 + class_index, number)
    pose = poses[rng.integers(len(poses))]
    pixels, (left, top, right, bottom) = draw_picture(species, pose, config.image_size, config.difficulty, rng)
    image = Image.fromarray(pixels)
    if rng.random() < config.grayscale_share:
        image = image.convert("L")
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=_JPEG_QUALITY)
    return Picture(class_index, number, encoded.getvalue(), (left, top, right, bottom))


def _stream(seed: int, *keys: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *keys))))
