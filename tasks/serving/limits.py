"""Limits on a client's requests, and the error for requests that exceed them."""

import io
import warnings

from PIL import Image

from dml_core.config import Config

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


class Limits(Config):
    """Limits on a request, which protect the machine's memory and other clients' time.

    Attributes:
        image_bytes: size of one encoded image.
        pixels: pixels of one image, read from its header before anything is decoded.
        elongation: longer side over shorter side; a line one pixel wide would grow when resized.
        images: images per request.
        body_bytes: size of one request's body, counted while it arrives.
        held_bytes: size of all bodies held at a time; clients beyond it are asked to retry.
        requests: requests processed at a time; clients beyond it are asked to retry.
        neighbours: the largest k.
        head_seconds: time for a request's first line and headers.
        quiet_seconds: time between two pieces of a body.
        body_seconds: time for a whole body.
        answer_seconds: time for the answer, once the request has arrived.
    """

    image_bytes: int = 20_000_000
    pixels: int = 50_000_000
    elongation: int = 50
    images: int = 64
    body_bytes: int = 64_000_000
    held_bytes: int = 512_000_000
    requests: int = 256
    neighbours: int = 1000
    head_seconds: float = 10.0
    quiet_seconds: float = 10.0
    body_seconds: float = 60.0
    answer_seconds: float = 60.0


class RefusedError(Exception):
    """A request that is refused.

    Attributes:
        status: HTTP status.
        why: one line for the client.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


def check_image(data: bytes, limits: Limits, name: str) -> None:
    """Refuse images by size and header, before decoding them.

    Args:
        data: an encoded file.
        limits: the limits.
        name: name of the image in the error.

    Raises:
        RefusedError: 413 too large, 422 not an image.
    """
    if not data:
        raise RefusedError(422, f"{name}: empty")
    if len(data) > limits.image_bytes:
        raise RefusedError(413, f"{name}: {len(data)} bytes; the limit is {limits.image_bytes}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's warnings on its own, larger limit and on unusual but valid files
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
    except Image.DecompressionBombError:
        raise RefusedError(413, f"{name}: too many pixels; the limit is {limits.pixels}") from None
    except Exception:  # noqa: BLE001 - Pillow's readers raise anything on malicious bytes
        raise RefusedError(422, f"{name}: not an image, or damaged; JPEG, PNG, WebP, GIF, BMP and TIFF are accepted") from None
    if width * height > limits.pixels:
        raise RefusedError(413, f"{name}: {width} x {height} pixels; the limit is {limits.pixels} pixels")
    if max(width, height) > limits.elongation * max(1, min(width, height)):
        raise RefusedError(422, f"{name}: {width} x {height} pixels; a side may be at most {limits.elongation} times the other")
