"""Small pictures of images, kept in an index so that whoever shows what was found need not open files by their names."""

import io

import numpy as np
import torch
from PIL import Image

from dml_core.data.store.decode import orientation, upright
from dml_core.errors import DataError

THUMBNAIL_PIXELS = 160
PLAIN_PIXELS = 64  # as small as that, every pixel is kept
QUALITY = 78


def thumbnail(data: bytes, name: str, num_pixels: int = THUMBNAIL_PIXELS) -> bytes:
    """An encoded image as a WebP of at most `num_pixels` on its longer side, upright and never enlarged.

    Raises:
        DataError: not an image, damaged, or of more pixels than Pillow trusts; `name` says which.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.draft("RGB", (2 * num_pixels, 2 * num_pixels))  # a large JPEG is decoded no larger than is of use
            turned = orientation(image)
            image.thumbnail((num_pixels, num_pixels))
            small = image.convert("RGBA" if image.has_transparency_data else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise DataError(f"{name}: not an image, damaged, or too large to be one; mend it or leave it out") from None
    if turned > 1:
        small = Image.fromarray(upright(torch.from_numpy(np.array(small)).permute(2, 0, 1), turned).permute(1, 2, 0).numpy())
    file = io.BytesIO()
    small.save(file, "WEBP", quality=QUALITY, lossless=max(small.size) <= PLAIN_PIXELS)
    return file.getvalue()


def picture_size(picture: bytes) -> tuple[int, int]:
    """Width and height of a thumbnail."""
    with Image.open(io.BytesIO(picture)) as image:
        return image.size
