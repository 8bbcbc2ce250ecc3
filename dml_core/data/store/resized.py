"""A store of images that are resized already, for protocols that begin with a fixed resize: less to decode and move in every epoch.

The resized pixels are kept losslessly (PNG), and resizing them to the same size again changes nothing, so the network is fed exactly
what it would be fed from the original files. Boxes, which are measured in the originals, are dropped.
"""

import dataclasses
import io

from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from dml_core.data.store.decode import decode_rgb, decode_upright
from dml_core.data.store.rows import Manifest, Row
from dml_core.data.store.sizes import Interpolation, Resize
from dml_core.errors import DataError


def resize(image: Tensor, size: Resize, interpolation: Interpolation) -> Tensor:
    """uint8 (C, H, W) resized with antialiasing, so that the short side is `size`, or to (height, width); the image itself where it is."""
    target, mode = [size] if isinstance(size, int) else list(size), InterpolationMode(interpolation)
    if interpolation == "lanczos":  # Pillow's alone
        of_pillow: Tensor = tv.pil_to_tensor(tv.resize(tv.to_pil_image(image), target, mode))
        return of_pillow
    resized: Tensor = tv.resize(image, target, mode, antialias=True)
    return resized


def resized(manifest: Manifest, size: Resize, interpolation: Interpolation, own_images: bool = False) -> Manifest:
    """The manifest with every image resized as `TransformConfig` does (an int is the short side), as PNG, without boxes.

    A person's own images are turned upright first, by their EXIF orientation.
    """
    rows = [dataclasses.replace(row, box=None) for row in manifest.rows]
    return Manifest(rows, lambda row: _resized_png(manifest, row, size, interpolation, own_images))


def _resized_png(manifest: Manifest, row: Row, size: Resize, interpolation: Interpolation, own_images: bool) -> bytes:
    try:
        image = (decode_upright if own_images else decode_rgb)(manifest.read_bytes(row))
    except ValueError as error:
        raise DataError(f"{row.path}: cannot be decoded ({error}); restore the file from the archive") from None
    encoded = io.BytesIO()
    Image.fromarray(resize(image, size, interpolation).permute(1, 2, 0).numpy()).save(encoded, "PNG")
    return encoded.getvalue()
