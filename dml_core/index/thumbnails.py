"""Small pictures of images, kept in an index so that whoever shows what was found need not open files by their names."""

import io

from PIL import Image, ImageOps

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
            upright = ImageOps.exif_transpose(image)
            upright.thumbnail((num_pixels, num_pixels))
            small = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise DataError(f"{name}: not an image, damaged, or too large to be one; mend it or leave it out") from None
    file = io.BytesIO()
    small.save(file, "WEBP", quality=QUALITY, lossless=max(small.size) <= PLAIN_PIXELS)
    return file.getvalue()


def picture_size(picture: bytes) -> tuple[int, int]:
    """Width and height of a thumbnail."""
    with Image.open(io.BytesIO(picture)) as image:
        return image.size
