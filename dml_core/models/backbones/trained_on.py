"""Images that a backbone's published weights were trained on: side, resize and scaling of pixels, for timm's models too."""

from dataclasses import dataclass
from typing import get_args

from dml_core.data.store.sizes import Interpolation
from dml_core.data.views.transform_config import Scaling
from dml_core.models.backbones.registry import TIMM_PREFIX, TRAINED_WITH

_SIDE, _RESIZE = 224, 256  # of the papers' backbones


@dataclass(frozen=True)
class TrainedOn:
    """Images of a backbone's published weights, as its test views see them.

    Attributes:
        side: side of the square input, in pixels.
        resize: short side to which images are resized before the central crop, in pixels.
        interpolation: of that resize.
        scaling: the scaling of pixels; of those that this project has, the nearest to a timm model's mean and standard deviation.
        has_fixed_side: the network accepts no other side (vision transformers).
    """

    side: int
    resize: int
    interpolation: Interpolation
    scaling: Scaling
    has_fixed_side: bool = False


def trained_on(name: str) -> TrainedOn | None:
    """Return the images that a backbone's published weights were trained on; None if it has no published weights. Imports timm for `timm:`.

    Raises:
        ConfigError: unknown timm model or tag; the message suggests the nearest name.
    """
    if name.startswith(TIMM_PREFIX):
        return _of_timm(name.removeprefix(TIMM_PREFIX))
    if name not in TRAINED_WITH:
        return None
    return TrainedOn(_SIDE, _RESIZE, "bilinear", TRAINED_WITH[name])


def _of_timm(name: str) -> TrainedOn | None:
    from dml_core.models.backbones.timm_model import published_config  # imports torch

    published = published_config(name)
    if published is None:
        return None
    side = int(published.input_size[-1])
    interpolation: Interpolation = published.interpolation if published.interpolation in get_args(Interpolation) else "bicubic"
    scaling = _nearest(published.mean, published.std)
    return TrainedOn(side, round(side / published.crop_pct), interpolation, scaling, published.fixed_input_size)


def _nearest(mean: tuple[float, ...], std: tuple[float, ...]) -> Scaling:
    """Return the scaling that maps black and white to the values nearest to those of a mean and standard deviation per RGB channel."""
    import torch

    from dml_core.data.views.transforms import scale

    pixels_C12 = torch.tensor([0, 255], dtype=torch.uint8).expand(3, 1, 2)
    expected_C12 = (pixels_C12 / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    scalings: tuple[Scaling, ...] = get_args(Scaling)
    return min(scalings, key=lambda scaling: float((scale(pixels_C12, scaling) - expected_C12).abs().max()))
