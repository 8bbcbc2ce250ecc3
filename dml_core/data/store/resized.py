"""Resizing of images before packing, for protocols that start with a fixed resize: less to decode and transfer in every epoch.

Resized pixels are stored losslessly (PNG), and resizing them to the same size again changes nothing, so the network's input is identical
to that from the original files. Boxes, which are measured in the originals, are dropped.
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


def resize(image: Tensor, size: Resize, interpolation: Interpolation) -> Tensor:
    """Resize uint8 (C, H, W), antialiased, to the short side `size` or to (height, width); an image of that size is returned unchanged."""
    target, mode = [size] if isinstance(size, int) else list(size), InterpolationMode(interpolation)
    if interpolation == "lanczos":  # only in Pillow
        return tv.pil_to_tensor(tv.resize(tv.to_pil_image(image), target, mode))
    return tv.resize(image, target, mode, antialias=True)


def resized(manifest: Manifest, size: Resize, interpolation: Interpolation, own_images: bool = False) -> Manifest:
    """Return the manifest with images resized as in `TransformConfig` (an int is the short side), as PNG, without boxes.

    The user's own images are first rotated upright by their EXIF orientation. Its `read_bytes` raises ValueError for a damaged image.
    """
    rows = [dataclasses.replace(row, box=None) for row in manifest.rows]
    return Manifest(rows, lambda row: _resized_png(manifest, row, size, interpolation, own_images))


def _resized_png(manifest: Manifest, row: Row, size: Resize, interpolation: Interpolation, own_images: bool) -> bytes:
    image = (decode_upright if own_images else decode_rgb)(manifest.read_bytes(row))
    encoded = io.BytesIO()
    Image.fromarray(resize(image, size, interpolation).permute(1, 2, 0).numpy()).save(encoded, "PNG")
    return encoded.getvalue()
