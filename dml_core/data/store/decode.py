"""Decoding of image bytes to RGB pixels, identical for packing, training and embedding.

JPEG and PNG use torchvision (libjpeg-turbo, libpng; the same pixels as Pillow's, several times faster for small images), other formats
Pillow. The papers' datasets are decoded as stored (`decode_rgb`), as in their released code; the user's own photographs are always rotated
upright by their EXIF orientation (`decode_upright`).
"""

import io
import struct
import warnings
import zlib
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg, decode_png
from torchvision.transforms.v2.functional import pil_to_tensor

MOST_PIXELS = 178_956_970  # Pillow's limit
MOST_TIMES_AS_LONG = 1000  # ratio of the sides: resizing the short side enlarges the long one
ORIENTATION_TAG = 0x0112
_JPEG_START = b"\xff\xd8"
_KINDS_OF_NVJPEG = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive; of Huffman codes
_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")  # a chunk, and texts that Pillow reads
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
# Of each pass over a PNG's pixels, by interlacing: the first column and row, and the steps to the next ones.
_PNG_PASSES = {
    0: ((0, 0, 1, 1),),
    1: ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
}
_PNG_FILTERS = 5
_PNG_BYTES_AT_ONCE = 8 << 20
_PNG_MOST_EXTRA = 1024  # bytes after the last row in which libpng looks for the end of the compressed data

# torchvision 0.29 recommends torchcodec on every call; the pinned version still decodes.
warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities of TorchVision", category=DeprecationWarning)
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # below `MOST_PIXELS`
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")  # caused by a damaged EXIF tag


class _Frame(NamedTuple):
    """A JPEG's frame header."""

    kind: int
    num_bits: int
    height: int
    width: int
    num_components: int


def decode_rgb(data: bytes) -> Tensor:
    """Decode one image to uint8 (3, height, width) as stored, converted to RGB (from grayscale, palette, CMYK, alpha).

    Raises:
        ValueError: the bytes are not one complete image, or have too many pixels; the message gives the reason.
    """
    if not data:
        raise ValueError("empty")
    try:
        _check_size(*_size(data))
        if data.startswith(_JPEG_START):
            return decode_jpeg(_as_tensor(data), mode=ImageReadMode.RGB)
        if data.startswith(_PNG_START):
            _check_png(data)
            pixels: Tensor = decode_png(_as_tensor(data), mode=ImageReadMode.RGB)
            return pixels if pixels.dtype == torch.uint8 else (pixels.int() >> 8).to(torch.uint8)  # the high byte of 16 bits
        with Image.open(io.BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError("of more than 8 bits per channel, convert it to PNG")
            return pil_to_tensor(image.convert("RGB"))
    except (MemoryError, ValueError):
        raise
    except (RuntimeError, zlib.error):
        raise ValueError("damaged or truncated") from None
    except Image.DecompressionBombError:
        raise ValueError(f"of more than {MOST_PIXELS:,} pixels, make it smaller") from None
    except Exception:  # noqa: BLE001 - Pillow raises errors of a dozen kinds where a file is damaged
        raise ValueError("not an image, or damaged") from None


def decode_upright(data: bytes) -> Tensor:
    """Decode one image like `decode_rgb` and rotate it upright by its EXIF orientation.

    Raises:
        ValueError: as for `decode_rgb`.
    """
    return upright(decode_rgb(data), _orientation(data)).contiguous()


def for_nvjpeg(data: bytes, own_image: bool) -> tuple[Tensor, int] | None:
    """Return a JPEG's bytes, uint8 (num_bytes,), and its EXIF orientation, 1 unless it is the user's `own_image`.

    Other images return None, to be decoded here: other formats, images to be refused, and JPEGs that nvJPEG does not decode (CMYK,
    arithmetic coding, lossless, more than 8 bits).
    """
    frame = _jpeg_frame(data) if data.startswith(_JPEG_START) else None
    if frame is None or frame.kind not in _KINDS_OF_NVJPEG or frame.num_bits != 8 or frame.num_components not in (1, 3):
        return None
    try:
        _check_size(frame.width, frame.height)
    except ValueError:
        return None
    return _as_tensor(data), _orientation(data) if own_image else 1


def _orientation(data: bytes) -> int:
    if data.startswith(_PNG_START) and not any(mark in data for mark in _PNG_ORIENTATION):
        return 1  # Pillow would decode the pixels to look for a chunk after them
    try:
        with Image.open(io.BytesIO(data)) as image:
            return orientation(image)
    except (OSError, SyntaxError, ValueError):  # metadata that Pillow refuses, and torchvision's decoders skip
        return 1


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image opened by Pillow, 1 (upright) to 8; 1 if it is missing or unreadable.

    TIFF has 1, because Pillow itself rotates its pixels.
    """
    if image.format == "TIFF":
        return 1
    try:
        value = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # noqa: BLE001 - a damaged tag leads Pillow to errors of a dozen kinds, and the pixels are whole
        return 1
    return value if value in range(1, 9) else 1


def upright(pixels: Tensor, exif_orientation: int) -> Tensor:
    """Rotate and mirror pixels (C, H, W) by an EXIF orientation, to (C, H, W) or (C, W, H)."""
    if exif_orientation > 4:  # stored rows are columns
        pixels = pixels.transpose(1, 2)
    mirrored = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(exif_orientation, [])
    return pixels.flip(mirrored) if mirrored else pixels


def _size(data: bytes) -> tuple[int, int]:
    """Return width and height from the header."""
    if data.startswith(_PNG_START) and len(data) >= 24:  # the signature and the start of the first chunk
        width, height = struct.unpack(">II", data[16:24])
        return width, height
    if data.startswith(_JPEG_START) and (frame := _jpeg_frame(data)) is not None:
        return frame.width, frame.height
    with Image.open(io.BytesIO(data)) as image:  # ten times slower
        return image.size


def _jpeg_frame(data: bytes) -> _Frame | None:
    """Return the frame header (markers C0 to CF except three); None if the segments are malformed.

    Segments begin with markers from C0 on, except D0 to D9. Bytes after others have no length, and skipping them by one could lead past
    the frame to bytes that look like another.
    """
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF and data[at + 1] >= 0xC0 and data[at + 1] not in range(0xD0, 0xDA):
        kind = data[at + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return _Frame(kind, *struct.unpack(">BHHB", data[at + 4 : at + 10]))
        at += 1 if kind == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4])  # skip a fill byte or a segment
    return None


def _check_size(width: int, height: int) -> None:
    """Reject an image that would need gigabytes.

    Raises:
        ValueError: too many pixels, or too long and thin.
    """
    if not width * height:
        raise ValueError("not an image, or damaged")
    if width * height > MOST_PIXELS:
        raise ValueError(f"of {width} x {height} pixels, more than {MOST_PIXELS:,}, make it smaller")
    if max(width, height) > MOST_TIMES_AS_LONG * min(width, height):
        raise ValueError(f"of {width} x {height} pixels, one side more than {MOST_TIMES_AS_LONG} times the other")


def _check_png(data: bytes) -> None:
    """Check a PNG's compressed pixels as libpng does: torchvision's decoder crashes the process where libpng finds an error in them.

    Raises:
        ValueError, zlib.error: the pixels are damaged or incomplete.
    """
    if len(data) < 33 or data[25] not in _PNG_CHANNELS or data[28] not in _PNG_PASSES:
        raise ValueError("not an image, or damaged")
    width, height, bits, colour, interlacing = struct.unpack(">IIBBxxB", data[16:29])
    rest, inflater = _png_pixels(data), zlib.decompressobj()
    for left, top, right_step, down_step in _PNG_PASSES[interlacing]:
        num_columns, num_rows = -((left - width) // right_step), -((top - height) // down_step)
        if num_columns < 1 or num_rows < 1:
            continue
        row_bytes = 1 + -(-num_columns * bits * _PNG_CHANNELS[colour] // 8)  # the first one is the row's filter
        while num_rows:
            num_read = min(num_rows, max(1, _PNG_BYTES_AT_ONCE // row_bytes))
            rows = inflater.decompress(rest, num_read * row_bytes)
            if len(rows) < num_read * row_bytes or max(rows[::row_bytes]) >= _PNG_FILTERS:
                raise ValueError("damaged or truncated")
            rest, num_rows = inflater.unconsumed_tail, num_rows - num_read
    if len(inflater.decompress(rest, _PNG_MOST_EXTRA)) < _PNG_MOST_EXTRA and not inflater.eof:  # it compares the checksum
        raise ValueError("damaged or truncated")


def _png_pixels(data: bytes) -> bytes:
    """Return a PNG's compressed pixels, from its consecutive IDAT chunks.

    Raises:
        ValueError: a chunk is damaged or incomplete.
    """
    parts, at = [], len(_PNG_START)
    while at + 12 <= len(data):
        num_bytes, kind = struct.unpack(">I4s", data[at : at + 8])
        end = at + 12 + num_bytes
        if kind == b"IDAT":
            if zlib.crc32(data[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]) or end > len(data):
                raise ValueError("damaged or truncated")
            parts.append(data[at + 8 : end - 4])
        elif parts:
            break
        at = end
    return b"".join(parts)


def _as_tensor(data: bytes) -> Tensor:
    """Return a copy as a tensor, because torch warns about read-only memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
