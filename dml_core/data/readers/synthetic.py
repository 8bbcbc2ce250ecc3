"""`synthetic`, the embedded dataset: generated pictures in the official layout of a published dataset, read by that dataset's loader.

The first half of the classes is for training, the second for test, as in CUB; in IDX files every class has both training and test images.
"""

import hashlib
import inspect
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from PIL import Image
from pydantic import Field, model_validator

from dml_core.data.drawing import creatures, layouts
from dml_core.data.drawing.creatures import Pose, Species, draw_picture, draw_pose, draw_species
from dml_core.data.drawing.layouts import WRITERS, Picture
from dml_core.data.readers.cars196 import Cars196
from dml_core.data.readers.cub200 import Cub200
from dml_core.data.readers.inshop import Inshop
from dml_core.data.readers.mnist import Mnist
from dml_core.data.readers.shared import idx_dataset
from dml_core.data.readers.shared.contract import DatasetConfig
from dml_core.data.readers.shared.generated import generate_once
from dml_core.data.readers.sop import Sop
from dml_core.data.store.rows import Row
from dml_core.data.store.sizes import MAX_SIDE

_JPEG_QUALITY = 92
_MOST_IDX_CLASSES = 10  # the labels that MNIST's reader accepts
_LOADERS: dict[str, Callable[..., DatasetConfig]] = {
    "cub200": Cub200,
    "cars-annos": Cars196,
    "cars-devkit": Cars196,
    "cars-folders": Cars196,
    "sop": Sop,
    "inshop": Inshop,
    "idx": partial(Mnist, split="images"),
}
Layout = Literal["cub200", "cars-annos", "cars-devkit", "cars-folders", "sop", "inshop", "idx"]


class Synthetic(DatasetConfig):
    """A generated dataset, read by its layout's loader; the same options give the same bytes.

    Attributes:
        num_classes: the first half is for training, the rest for test; at most ten in the layout "idx", where all are in both.
        images_per_class: pictures of each class.
        image_size: side in pixels.
        num_modes: poses, shared by all classes; a picture shows one of them.
        difficulty: 0 to 1, strength of every nuisance (position, rotation, light, clutter).
        grayscale_share: share of the pictures stored without colour.
        seed: seed of all random draws.
        layout: published dataset whose files and tables are written.
    """

    how_to_get: ClassVar[str] = "it is generated; run `dml data fetch synthetic`"

    num_classes: int = Field(default=40, ge=2, le=1_000_000)
    images_per_class: int = Field(default=50, ge=2, le=1_000_000)
    image_size: int = Field(default=48, ge=8, le=MAX_SIDE)
    num_modes: int = Field(default=4, ge=1, le=1000)
    difficulty: float = Field(default=0.6, ge=0.0, le=1.0)
    grayscale_share: float = Field(default=0.02, ge=0.0, le=1.0)
    seed: int = Field(default=0, ge=0, lt=2**32)
    layout: Layout = "cub200"

    @model_validator(mode="after")
    def _fits_the_layout(self) -> "Synthetic":
        if self.layout == "idx" and self.num_classes > _MOST_IDX_CLASSES:
            raise ValueError(f"layout 'idx' has at most {_MOST_IDX_CLASSES} classes, found num_classes {self.num_classes}: lower it")
        return self

    @property
    def shares_classes(self) -> bool:
        """As in the layout's loader."""
        return self._loader().shares_classes

    def rows(self, raw: Path) -> list[Row]:
        """Return the rows from the layout's loader; the published counts do not apply."""
        return self._loader().rows(raw)

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """Return the reader of the layout's loader."""
        return self._loader().reader(raw)

    def _loader(self) -> DatasetConfig:
        return _LOADERS[self.layout](published_counts=False)

    def _sources_sha256(self) -> str:
        """Return a hash of the generator's and the loader's source, so that a tree from another version of either is regenerated."""
        loader = idx_dataset.__file__ if self.layout == "idx" else inspect.getfile(type(self._loader()))
        sources = (__file__, creatures.__file__, layouts.__file__, loader)
        return hashlib.sha256(b"".join(Path(path).read_bytes() for path in sources)).hexdigest()

    def materialise(self, raw: Path) -> None:
        """Generate the dataset unless `raw` holds the result of these options and this generator; another generated tree is replaced.

        Raises:
            DataError: `raw` holds files that the generator did not write.
        """
        drawn = self.model_dump_json(indent=2, exclude=set(DatasetConfig.model_fields))
        generate_once(raw, f"{drawn}\n{self._sources_sha256()}\n", lambda folder: generate(self, folder))


def draw_pictures(config: Synthetic) -> Iterator[Picture]:
    """Yield all pictures, class by class. Each has its own random stream and does not depend on how many others there are."""
    poses = [draw_pose(_stream(config.seed, 0, mode)) for mode in range(config.num_modes)]
    for class_index in range(config.num_classes):
        species = draw_species(_stream(config.seed, 1, class_index))
        for number in range(config.images_per_class):
            yield _draw(config, species, poses, class_index, number)


def generate(config: Synthetic, folder: Path) -> None:
    """Write the dataset in its configured layout under `folder`, which must not hold one yet."""
    WRITERS[config.layout](folder, draw_pictures(config), config.num_classes)


def _draw(config: Synthetic, species: Species, poses: list[Pose], class_index: int, number: int) -> Picture:
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
