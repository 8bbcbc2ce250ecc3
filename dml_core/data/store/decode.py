"""Encoded image bytes to RGB pixels, the same in packing, training and embedding.

JPEG and PNG go through torchvision (libjpeg-turbo, libpng; the same pixels as Pillow's, several times faster for small images),
every other format through Pillow. EXIF orientation is not applied, as in the published pipelines.
"""

import io
import warnings

import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg, decode_png
from torchvision.transforms.v2.functional import pil_to_tensor

_JPEG_START = b"\xff\xd8"
_PNG_START = b"\x89PNG"

# torchvision 0.29 names torchcodec as its successor on every call; the pinned version still decodes.
warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities of TorchVision", category=DeprecationWarning)


def decode_rgb(data: bytes) -> Tensor:
    """Decode one image to uint8 (3, height, width), RGB whatever the file holds (grayscale, palette, CMYK, alpha).

    Raises:
        ValueError: the bytes are not one whole image; the text says what the decoder found.
    """
    if not data:
        raise ValueError("empty")
    try:
        if data.startswith(_JPEG_START):
            return decode_jpeg(_as_tensor(data), mode=ImageReadMode.RGB)  # type: ignore[no-any-return]
        if data.startswith(_PNG_START):
            return _to_8_bits(decode_png(_as_tensor(data), mode=ImageReadMode.RGB))
        with Image.open(io.BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError("of more than 8 bits per channel, convert it to PNG")
            return pil_to_tensor(image.convert("RGB"))  # type: ignore[no-any-return]
    except RuntimeError:
        raise ValueError("damaged or truncated") from None
    except (OSError, SyntaxError, Image.DecompressionBombError):
        raise ValueError("not an image, or damaged") from None


def _to_8_bits(pixels: Tensor) -> Tensor:
    """The high byte of 16-bit pixels; others as they are."""
    return pixels if pixels.dtype == torch.uint8 else (pixels.int() >> 8).to(torch.uint8)


def _as_tensor(data: bytes) -> Tensor:
    """A copy, because torch warns about memory that it must not write."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
