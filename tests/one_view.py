"""Views of single images, scaled as for the network."""

from torch import Tensor

from dml_core.data.store.rows import Box
from dml_core.data.views.transform_config import TransformConfig
from dml_core.data.views.transforms import scale, test_pixels, train_pixels


def train_view(image: Tensor, config: TransformConfig, seed: int, epoch: int, index: int, box: Box | None = None, copy: int = 0) -> Tensor:
    """Return the training view of an image, float32 (C, H', W')."""
    return scale(train_pixels(image, config, seed, epoch, index, box, copy), config.scaling)


def plain_view(image: Tensor, config: TransformConfig, box: Box | None = None) -> Tensor:
    """Return the test view of an image, float32 (C, H', W')."""
    return scale(test_pixels(image, config, box), config.scaling)
