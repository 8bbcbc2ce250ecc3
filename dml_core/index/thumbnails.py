"""Small images stored in an index, so that search results can be shown without opening files by their names."""

import io

import numpy as np
import torch
from PIL import Image

from dml_core.data.store.decode import decode_upright, orientation, upright
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
        try:
            small = _by_pillow(data, num_pixels)
        except (OSError, SyntaxError, ValueError):  # also of metadata that the network's decoder skips
            small = Image.fromarray(decode_upright(data).permute(1, 2, 0).numpy())
            small.thumbnail((num_pixels, num_pixels))
    except Exception:  # noqa: BLE001 - Pillow raises errors of a dozen kinds where a file is damaged
        raise DataError(f"{name}: not an image, damaged, or too large to be one; repair it or leave it out") from None
    file = io.BytesIO()
    small.save(file, "WEBP", quality=QUALITY, lossless=max(small.size) <= PLAIN_PIXELS)
    return file.getvalue()


def _by_pillow(data: bytes, num_pixels: int) -> Image.Image:
    with Image.open(io.BytesIO(data)) as stored:
        turned = orientation(stored)
        if stored.format == "PNG" and stored.mode.startswith("I"):  # Pillow's conversion makes all 16-bit values above 255 white
            raise ValueError
        stored.draft("RGB", (2 * num_pixels, 2 * num_pixels))  # decodes a large JPEG at reduced size
        small = stored.convert("RGBA" if stored.has_transparency_data else "RGB")
        small.thumbnail((num_pixels, num_pixels))  # after the conversion: Pillow drops pixels of a palette instead of averaging them
    if turned == 1:
        return small
    return Image.fromarray(upright(torch.from_numpy(np.array(small)).permute(2, 0, 1), turned).permute(1, 2, 0).numpy())


def picture_size(picture: bytes) -> tuple[int, int]:
    """Return width and height of a thumbnail."""
    with Image.open(io.BytesIO(picture)) as image:
        return image.size
