"""Decoding of a batch's JPEGs on the training device, by nvJPEG on a GPU (`TransformConfig.decoder`).

Loader processes only read the bytes. On the CPU the same code decodes by libjpeg-turbo, to the pixels of `PackedDataset.image`: tests
compare them bit for bit without a GPU.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from dml_core.data.store.decode import upright
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Box
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import ConfigError, DataError, first_line


class EncodedBatch(NamedTuple):
    """The images of a batch as they were read.

    Attributes:
        data: bytes of all images, one after the other. A tensor per image would take a file descriptor each between processes.
        shapes: (num_bytes,) of a JPEG, (3, H, W) of an image decoded on the CPU.
        orientations: EXIF orientation to rotate each image by.
        boxes: box of each image.
        indices: each image's index in its dataset.
        copies: number of each image's earlier occurrences in the epoch.
    """

    data: Tensor
    shapes: list[tuple[int, ...]]
    orientations: list[int]
    boxes: list[Box | None]
    indices: list[int]
    copies: list[int]


def check_decoder(config: TransformConfig, device: torch.device) -> None:
    """Reject decoding by nvJPEG without a GPU.

    Raises:
        ConfigError: the decoder needs a GPU, and the device is none.
    """
    if config.decoder == "nvjpeg" and device.type != "cuda":
        raise ConfigError(
            f"transform.decoder is 'nvjpeg', which needs a GPU, and this worker's device is {device.type}; "
            "set scale.device to cuda, or decoder to cpu"
        )


def read_encoded(dataset: PackedDataset, indices: Sequence[int], copies: Sequence[int]) -> EncodedBatch:
    """Read a batch without decoding its JPEGs."""
    images, orientations = zip(*(dataset.encoded(index) for index in indices), strict=True)
    data = torch.cat([image.flatten() for image in images])
    shapes = [tuple(image.shape) for image in images]
    return EncodedBatch(data, shapes, list(orientations), [dataset.box(index) for index in indices], list(indices), list(copies))


def decode_batch(batch: EncodedBatch, dataset: PackedDataset, device: torch.device) -> list[Tensor]:
    """Return a batch's images on the device, uint8 (3, H, W), RGB, upright.

    Raises:
        DataError: a JPEG is damaged, or of a kind that nvJPEG does not decode; the message names the image.
    """
    parts = torch.split(batch.data, [math.prod(shape) for shape in batch.shapes])
    jpegs = [place for place, shape in enumerate(batch.shapes) if len(shape) == 1]
    decoded = iter(_decode([parts[place] for place in jpegs], [batch.indices[place] for place in jpegs], dataset, device))
    images = []
    for part, shape, orientation in zip(parts, batch.shapes, batch.orientations, strict=True):
        pixels = next(decoded) if len(shape) == 1 else part.view(shape).to(device, non_blocking=True)
        images.append(upright(pixels, orientation).contiguous())
    return images


def _decode(jpegs: list[Tensor], indices: list[int], dataset: PackedDataset, device: torch.device) -> list[Tensor]:
    """Decode JPEGs in one call; on an error find the image that causes it, as torchvision does not name it."""
    if not jpegs:
        return []
    if device.type == "cuda":
        # nvJPEG does not wait for this stream, and would overwrite memory that work queued here still reads (pytorch/vision, pull 9606).
        torch.cuda.current_stream(device).synchronize()
    try:
        return decode_jpeg(jpegs, mode=ImageReadMode.RGB, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        for jpeg, index in zip(jpegs, indices, strict=True):
            dataset.image(index)
            try:
                decode_jpeg([jpeg], mode=ImageReadMode.RGB, device=device)
            except RuntimeError as error:
                reason = first_line(error)
                raise DataError(f"image {index} is not damaged, but nvJPEG does not decode it ({reason}); set decoder to cpu") from None
        raise
