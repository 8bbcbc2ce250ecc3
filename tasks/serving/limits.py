"""Limits on clients' requests, which protect the machine's memory and other clients' time; requests beyond them are refused."""

import io
import warnings

from PIL import Image
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from dml_core.errors import printable

IMAGE_BYTES = 20_000_000  # of one encoded image
PIXELS = 50_000_000  # of one image, read from its header before anything is decoded
REQUEST_PIXELS = 800_000_000  # of all images of a request: 64 photographs. A network without a crop has them whole in memory: 2.4 GB
HEADER_READS = 50_000  # of Pillow for an image's size: some for each segment of a JPEG and each chunk of a PNG
ELONGATION = 50  # longer side over shorter side: a line one pixel wide would grow when resized
IMAGES = 64  # per request
NEIGHBOURS = 1000  # the largest k
HITS = 5000  # of all images of a request: with thumbnails, an answer of 30 MB
BODY_BYTES = 64_000_000  # of one request, counted while it arrives
HELD_BYTES = 512_000_000  # of all requests at a time; clients beyond it are asked to retry
REQUESTS = 256  # processed at a time; clients beyond it are asked to retry
HEAD_SECONDS = 10.0  # for a request's first line and headers
QUIET_SECONDS = 10.0  # between two pieces of a body, and without reading an answer
BODY_SECONDS = 60.0  # for a whole body, and for reading a whole answer
ANSWER_SECONDS = 60.0  # once the request has arrived
DRAIN_SECONDS = 5  # for requests in progress when the service ends

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
LONGEST_LINE = 300


def refusal(error: HTTPException) -> JSONResponse:
    """Return the response to a refused request: the reason as one line of printable characters."""
    line = printable(error.detail[:LONGEST_LINE])[:LONGEST_LINE]  # a field's name may have the size of a body
    headers = {503: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}.get(error.status_code, {})
    return JSONResponse({"error": line}, error.status_code, {**(error.headers or {}), **headers})


class _FewReads(io.BytesIO):
    """An image that Pillow gives up after `HEADER_READS` pieces: it would read any number of segments one by one, for seconds."""

    num_left = HEADER_READS

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes.

        Raises:
            ValueError: there were `HEADER_READS` calls before.
        """
        self.num_left -= 1
        if self.num_left < 0:
            raise ValueError("too many segments")
        return super().read(size)


def check_image(data: bytes, name: str) -> int:
    """Return the number of pixels of an encoded image, or refuse it by size and header, before decoding; errors begin with its name.

    Raises:
        HTTPException: 413 too large, 422 not an image.
    """
    if not data:
        raise HTTPException(422, f"{name}: empty")
    if len(data) > IMAGE_BYTES:
        raise HTTPException(413, f"{name}: {len(data)} bytes; the limit is {IMAGE_BYTES}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's warnings on its own, larger limit and on unusual but valid files
            with Image.open(_FewReads(data), formats=FORMATS) as image:
                width, height = image.size
    except Image.DecompressionBombError:
        raise HTTPException(413, f"{name}: too many pixels; the limit is {PIXELS}") from None
    except Exception:  # noqa: BLE001 - Pillow's readers raise anything on malicious bytes
        raise HTTPException(422, f"{name}: not an image, or damaged; {', '.join(FORMATS)} are accepted") from None
    if width * height > PIXELS:
        raise HTTPException(413, f"{name}: {width} x {height} pixels; the limit is {PIXELS} pixels")
    if max(width, height) > ELONGATION * max(1, min(width, height)):
        raise HTTPException(422, f"{name}: {width} x {height} pixels; a side may be at most {ELONGATION} times the other")
    return int(width * height)
