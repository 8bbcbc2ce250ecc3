"""What one client may ask of the service, and what a request is refused with that asks for more."""

import io
import warnings

from PIL import Image

from dml_core.config import Config

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


class Limits(Config):
    """Bounds on a request, so that a client costs neither the machine's memory nor another client's time.

    Attributes:
        image_bytes: of one encoded image.
        pixels: of one image, as its header says, before anything is decoded.
        elongation: longer side over shorter side; a line of one pixel would be resized to more than its pixels say.
        images: in one request.
        body_bytes: of one request's body, counted while it comes in.
        held_bytes: of all bodies that are held at a time; what comes beyond is asked to come again.
        requests: that are worked on at a time; what comes beyond is asked to come again.
        neighbours: the largest k.
        head_seconds: for a request's first line and headers.
        quiet_seconds: between two pieces of a body.
        body_seconds: for the whole of a body.
        answer_seconds: for the answer, once the request is there.
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
    """A request that is not answered.

    Attributes:
        status: of HTTP.
        why: one line for the client.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


def check_image(data: bytes, limits: Limits, name: str) -> None:
    """Refuse by its size and its header what shall not be decoded.

    Args:
        data: an encoded file.
        limits: the bounds.
        name: what the refusal calls the image.

    Raises:
        RefusedError: 413 too large, 422 not an image.
    """
    if not data:
        raise RefusedError(422, f"{name}: empty")
    if len(data) > limits.image_bytes:
        raise RefusedError(413, f"{name}: {len(data)} bytes; at most {limits.image_bytes} are taken")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow's own, larger bound; and of files that are odd and no more
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
    except Image.DecompressionBombError:
        raise RefusedError(413, f"{name}: too many pixels; at most {limits.pixels} are taken") from None
    except Exception:  # noqa: BLE001 - Pillow's readers raise anything on bytes that were made to confuse them
        raise RefusedError(422, f"{name}: not an image, or damaged; JPEG, PNG, WebP, GIF, BMP and TIFF are taken") from None
    if width * height > limits.pixels:
        raise RefusedError(413, f"{name}: {width} x {height} pixels; at most {limits.pixels} are taken")
    if max(width, height) > limits.elongation * max(1, min(width, height)):
        raise RefusedError(422, f"{name}: {width} x {height} pixels; a side may be at most {limits.elongation} times the other")
