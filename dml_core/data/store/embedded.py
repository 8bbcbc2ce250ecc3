"""Images with the embeddings that a run computed of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dml_core.data.store.packed import PackedDataset


@dataclass(frozen=True)
class EmbeddedImages:
    """Images of one role with a run's embeddings: one side of a retrieval, or both.

    Attributes:
        role: "test", "train", "query", ...; "validation" for held-out training classes.
        dataset: the N images.
        embeddings: (N, D), from the network in test mode.
        labels: (N,), class indices.
    """

    role: str
    dataset: PackedDataset
    embeddings: NDArray[Any]
    labels: NDArray[np.int64]

    @property
    def description(self) -> str:
        """Name of the images in pictures' titles."""
        return "training images" if self.role == "train" else f"{self.role} images"

    def class_name(self, index: int) -> str:
        """Return the name of the image's class."""
        return self.dataset.class_names[int(self.labels[index])]

    def image(self, index: int) -> Image.Image:
        """Return the image as it is stored."""
        return Image.fromarray(self.dataset.image(int(index)).permute(1, 2, 0).numpy())
