"""Small images stored in an index, so that search results can be shown without opening files by their names."""

import io

import numpy as np
import torch
from PIL import Image

from dml_core.data.store.decode import decode_rgb, orientation, upright
from dml_core.errors import DataError
from dml_core.index.layout import THUMBNAIL_PIXELS

PLAIN_PIXELS = 64  # up to this size, every pixel is kept
QUALITY = 78


def thumbnail(data: bytes, name: str, num_pixels: int = THUMBNAIL_PIXELS) -> bytes:
    """Return an encoded image as a WebP of at most `num_pixels` on its longer side, upright and never enlarged.

    Raises:
        DataError: the file `name` is not an image, is damaged, or has more pixels than Pillow accepts.
    """
    try:
        with Image.open(io.BytesIO(data)) as stored:
            turned = orientation(stored)
            image = _of_8_bits(data) if stored.format == "PNG" and stored.mode.startswith("I") else stored
            image.draft("RGB", (2 * num_pixels, 2 * num_pixels))  # decodes a large JPEG at reduced size
            image.thumbnail((num_pixels, num_pixels))
            small = image.convert("RGBA" if image.has_transparency_data else "RGB")
    except Exception:  # noqa: BLE001 - Pillow raises errors of a dozen kinds where a file is damaged
        raise DataError(f"{name}: not an image, damaged, or too large to be one; mend it or leave it out") from None
    if turned > 1:
        small = Image.fromarray(upright(torch.from_numpy(np.array(small)).permute(2, 0, 1), turned).permute(1, 2, 0).numpy())
    file = io.BytesIO()
    small.save(file, "WEBP", quality=QUALITY, lossless=max(small.size) <= PLAIN_PIXELS)
    return file.getvalue()


def _of_8_bits(data: bytes) -> Image.Image:
    """Return a PNG of 16 bits per pixel as the network sees it; Pillow's conversion makes all values above 255 white."""
    return Image.fromarray(decode_rgb(data).permute(1, 2, 0).numpy())


def picture_size(picture: bytes) -> tuple[int, int]:
    """Return width and height of a thumbnail."""
    with Image.open(io.BytesIO(picture)) as image:
        return image.size
