"""Views of the papers' protocols: from decoded pixels to the network's input.

Every random draw of a training view derives from (seed, epoch, index, copy) by a counter-based generator (Philox), so a view does not
depend on process, order or batch. Geometry uses uint8 pixels, as the published pipelines (Pillow) do; resizing is antialiased.

Shapes: C = 3 channels, H and W in pixels.
"""

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from dml_core.data.store.resized import resize
from dml_core.data.store.rows import Box
from dml_core.data.store.sizes import Resize
from dml_core.data.views.transform_config import Jitter, Scaling, TransformConfig

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_MEANS_BGR = {"bgr-caffe": (104.0, 117.0, 128.0), "bgr-bvlc": (104.0, 117.0, 123.0)}
_NUM_CROP_ATTEMPTS = 10


def train_pixels(
    image: Tensor, config: TransformConfig, seed: int, epoch: int, index: int, box: Box | None = None, copy: int = 0
) -> Tensor:
    """Return the unscaled pixels of a training view of uint8 `image` (C, H, W) as uint8 RGB (C, H', W').

    Args:
        seed, epoch, index, copy: determine all draws; `index` is the image's index in its dataset, `copy` the number of its earlier
            occurrences in the epoch.
        box: the image's box, used if the configuration crops to it.
    """
    image = _resize(_cut_to_box(image, config, box), config.train_resize, config)
    if config.crop == "none" and not config.flip and config.jitter == Jitter():
        return image
    rng = view_generator(seed, epoch, index, copy)
    if config.jitter_first:
        image = _jitter(image, config.jitter, rng)
    image = _random_crop(image, config, rng)
    if config.flip and rng.random() < 0.5:
        image = image.flip(2)
    if not config.jitter_first:
        image = _jitter(image, config.jitter, rng)
    return image


def test_pixels(image: Tensor, config: TransformConfig, box: Box | None = None) -> Tensor:  # noqa: PT028 (not a test)
    """Return the pixels of the test view of uint8 `image` (C, H, W) as uint8 RGB: resized, and centre-cropped if there is a crop size."""
    image = _resize(_cut_to_box(image, config, box), config.test_resize, config)
    if config.crop_size is not None and image.shape[1:] != (config.crop_size, config.crop_size):
        image = tv.center_crop(image, [config.crop_size, config.crop_size])
    return image


def view_generator(seed: int, epoch: int, index: int, copy: int = 0) -> np.random.Generator:
    """Return the generator of one view's draws: (seed, epoch) is Philox's key, copy and index its counter's high words."""
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, copy, index], dtype=np.uint64)))


def scale(pixels: Tensor, scaling: Scaling, out: Tensor | None = None) -> Tensor:
    """Scale uint8 RGB pixels (..., C, H, W) to the float32 range and channel order that a network was trained with.

    A float32 product and sum, each rounded as IEEE 754 requires, give the same bits on every device and for any number of images. The
    result is written to `out`, if given.
    """
    factor_C11, shift_C11 = _scaling_constants(scaling, pixels.device)
    if scaling in _MEANS_BGR:
        pixels = pixels.flip(-3)
    return torch.mul(pixels, factor_C11, out=out).add_(shift_C11)


@cache
def _scaling_constants(scaling: Scaling, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return factor and shift per channel, in the output's channel order, computed on the CPU for every device."""
    zeros, ones = torch.zeros(3, dtype=torch.float32), torch.ones(3, dtype=torch.float32)
    mean, std = {
        "rgb-imagenet": (ones.new_tensor(_IMAGENET_MEAN) * 255, ones.new_tensor(_IMAGENET_STD) * 255),
        **{name: (ones.new_tensor(mean_bgr), ones) for name, mean_bgr in _MEANS_BGR.items()},
        "zero-one": (zeros, ones * 255),
        "minus-one-one": (ones * 127.5, ones * 127.5),
    }[scaling]
    return (1 / std)[:, None, None].to(device), (-mean / std)[:, None, None].to(device)


def _cut_to_box(image: Tensor, config: TransformConfig, box: Box | None) -> Tensor:
    """Crop to the pixels that the box touches; a box outside the image is clamped to at least one pixel at its border."""
    if not config.crop_to_box or box is None:
        return image
    height, width = image.shape[1:]
    left, top = min(max(int(box[0]), 0), width - 1), min(max(int(box[1]), 0), height - 1)
    right, bottom = max(min(math.ceil(box[2]), width), left + 1), max(min(math.ceil(box[3]), height), top + 1)
    return image[:, top:bottom, left:right]


def _resize(image: Tensor, size: Resize | None, config: TransformConfig) -> Tensor:
    return image if size is None else resize(image, size, config.interpolation)


def _random_crop(image: Tensor, config: TransformConfig, rng: np.random.Generator) -> Tensor:
    if config.crop == "none":
        return image
    assert config.crop_size is not None
    if config.crop == "random_resized":
        top, left, height, width = _random_part(image.shape[1], image.shape[2], config, rng)
        part = image[:, top : top + height, left : left + width]
        return _resize(part, (config.crop_size, config.crop_size), config)
    if config.crop == "padded":
        image = torch.nn.functional.pad(image, [config.padding] * 4)
    if min(image.shape[1:]) < config.crop_size:
        image = tv.center_crop(image, [max(side, config.crop_size) for side in image.shape[1:]])
    num_offsets = [side - config.crop_size + 1 for side in image.shape[1:]]
    if config.crop == "random_exclusive":
        num_offsets = [max(number - 1, 1) for number in num_offsets]
    top, left = (int(rng.integers(number)) for number in num_offsets)
    return image[:, top : top + config.crop_size, left : left + config.crop_size]


def _random_part(height: int, width: int, config: TransformConfig, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Return (top, left, height, width): area uniform, log ratio uniform; the largest central part of allowed ratio if none fits."""
    log_low, log_high = math.log(config.crop_ratio[0]), math.log(config.crop_ratio[1])
    for _ in range(_NUM_CROP_ATTEMPTS):
        area = height * width * rng.uniform(*config.crop_area)
        ratio = math.exp(rng.uniform(log_low, log_high))
        part_width, part_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < part_width <= width and 0 < part_height <= height:
            top, left = rng.integers(height - part_height + 1), rng.integers(width - part_width + 1)
            return int(top), int(left), part_height, part_width
    ratio = min(max(width / height, config.crop_ratio[0]), config.crop_ratio[1])
    part_width, part_height = min(width, round(height * ratio)), min(height, round(width / ratio))
    return (height - part_height) // 2, (width - part_width) // 2, part_height, part_width


def _jitter(image: Tensor, jitter: Jitter, rng: np.random.Generator) -> Tensor:
    """Apply the four adjustments in random order, with factors uniform around 1 (hue: around 0)."""
    if jitter == Jitter():
        return image
    adjustments = (
        (tv.adjust_brightness, 1.0, jitter.brightness),
        (tv.adjust_contrast, 1.0, jitter.contrast),
        (tv.adjust_saturation, 1.0, jitter.saturation),
        (tv.adjust_hue, 0.0, jitter.hue),
    )
    for position in rng.permutation(len(adjustments)):
        adjust, neutral, strength = adjustments[position]
        if strength:
            image = adjust(image, neutral + strength * rng.uniform(-1.0, 1.0))
    return image
