"""Bad input is refused with a 4xx and one line of JSON, and the service keeps answering."""

import base64
import io
import json
import socket
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.exceptions import HTTPException

from tasks.serving import limits
from tests.tasks.serving.conftest import Made, Service

TOKEN = "a token of letters enough"


def png(width: int, height: int) -> bytes:
    """Return a PNG of one colour with this size in its header, a thousand times smaller than its pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(bytes(width + 1)) for _ in range(min(height, 2000))) + packer.flush()
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )


def picture(kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


GOOD = picture()
BROKEN_FORM = b'--x\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\nabc'
TEXT = base64.b64encode(GOOD).decode()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_an_image_is_taken(kind: str) -> None:
    limits.check_image(picture(kind), "image 1")


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (b"", 422, "empty"),
        (b"not an image", 422, "not an image, or damaged; JPEG, PNG, WEBP, GIF, BMP, TIFF, AVIF are accepted"),
        (GOOD[:20], 422, "not an image"),
        (bytes(limits.IMAGE_BYTES + 1), 413, "bytes"),
        (png(20_000, 20_000), 413, "pixels"),  # Pillow's limit
        (png(10_000, 6_000), 413, "60"),
        (png(20_000, 20), 422, "times the other"),  # few pixels until the shorter side is resized to the crop's
        (b"%PDF-1.4 " + GOOD, 422, "not an image"),
    ],
)
def test_an_image_is_refused_by_its_header(data: bytes, status: int, says: str) -> None:
    with pytest.raises(HTTPException, match=says) as refused:
        limits.check_image(data, "image 1")
    assert refused.value.status_code == status
    assert "\n" not in refused.value.detail


def many_parts(kind: str) -> bytes:
    """Return an image of a kind, with a million parts without content before its pixels."""
    data = picture(kind)
    at, part = (33, b"\0\0\0\0prVt" + struct.pack(">I", zlib.crc32(b"prVt"))) if kind == "PNG" else (2, b"\xff\xfe\0\2")
    return data[:at] + 1_000_000 * part + data[at:]


FILLED = b"\xff\xd8" + 1_000_000 * b"\xff" + picture("JPEG")[2:]


@pytest.mark.parametrize("data", [many_parts("JPEG"), many_parts("PNG"), FILLED], ids=["JPEG", "PNG", "fill bytes"])
def test_a_header_of_a_million_parts_is_not_read(data: bytes) -> None:
    """Pillow reads one after another, for seconds."""
    with pytest.raises(HTTPException, match="not an image, or damaged"):
        limits.check_image(data, "image 1")


@dataclass(frozen=True)
class Bad:
    """A request, and the status of its refusal."""

    status: int
    path: str = "/v1/search"
    method: str = "POST"
    what: dict[str, Any] = field(default_factory=dict)


def as_json(**values: Any) -> dict[str, Any]:
    return {"json": values}


def as_text(text: str | bytes, content_type: str = "application/json") -> dict[str, Any]:
    return {"content": text, "headers": {"content-type": content_type}}


def as_file(data: bytes, name: str = "a.png", **values: str) -> dict[str, Any]:
    return {"files": {"image": (name, data)}, "data": values}


BAD = {
    "truncated PNG": Bad(422, what=as_file(GOOD[: len(GOOD) // 2])),
    "truncated JPEG": Bad(422, what=as_file(picture("JPEG")[:300])),
    "truncated WebP": Bad(422, what=as_file(picture("WEBP")[:200])),
    "not an image": Bad(422, what=as_file(b"hello")),
    "an empty file": Bad(422, what=as_file(b"")),
    "huge file": Bad(413, what=as_file(bytes(limits.IMAGE_BYTES + 1))),
    "huge body": Bad(413, what=as_text(bytes(limits.BODY_BYTES + 1))),
    "decompression bomb": Bad(413, what=as_file(png(20_000, 20_000))),
    "bomb below Pillow's bound": Bad(413, what=as_file(png(10_000, 6_000))),
    "a line of pixels": Bad(422, what=as_file(png(20_000, 20))),
    "SVG": Bad(422, what=as_file(b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>')),
    "wrong JSON": Bad(400, what=as_text('{"images": [')),
    "JSON of another kind": Bad(422, what=as_text("[1, 2]")),
    "deep JSON": Bad(400, what=as_text("[" * 100_000)),
    "bytes that are no text": Bad(400, what=as_text(b"\xff\xfe{}")),
    "an unknown key": Bad(422, what=as_json(images=[TEXT], paths=["/etc/passwd"])),
    "wrong base64": Bad(400, what=as_json(images=["%%%"])),
    "a path for an image": Bad(400, what=as_json(images=["../../etc/passwd"])),
    "a path that is base64": Bad(422, what=as_json(images=["/etc/passwd/"])),
    "a URL for an image": Bad(400, what=as_json(images=["file:///etc/passwd"])),
    "a number for an image": Bad(422, what=as_json(images=[7])),
    "a path as a file's name": Bad(422, what=as_file(b"x", name="../../../etc/passwd")),
    "zero images": Bad(422, what=as_json(images=[])),
    "no file in the form": Bad(400, what={"files": {"other": ("a.png", GOOD)}}),
    "text for a file": Bad(400, what={"data": {"image": "/etc/passwd"}, "files": {"k": ("", b"3")}}),
    "too many images": Bad(413, what=as_json(images=[TEXT] * (limits.IMAGES + 1))),
    "too many files": Bad(413, what={"files": [("image", ("a.png", GOOD))] * (limits.IMAGES + 1)}),
    "one of two is damaged": Bad(422, what=as_json(images=[TEXT, base64.b64encode(GOOD[:-30]).decode()])),
    "k of 0": Bad(422, what=as_json(images=[TEXT], k=0)),
    "k negative": Bad(422, what=as_json(images=[TEXT], k=-3)),
    "k huge": Bad(422, what=as_json(images=[TEXT], k=10**30)),
    "k above the bound": Bad(422, what=as_json(images=[TEXT], k=limits.NEIGHBOURS + 1)),
    "k as text": Bad(422, what=as_json(images=[TEXT], k="10")),
    "k a fraction": Bad(422, what=as_json(images=[TEXT], k=2.5)),
    "k NaN": Bad(422, what=as_text(f'{{"images": ["{TEXT}"], "k": NaN}}')),
    "k as text in a form": Bad(422, what=as_file(GOOD, k="many")),
    "k twice in a form": Bad(400, what={"files": [("image", ("a.png", GOOD)), ("k", (None, "1")), ("k", (None, "2"))]}),
    "wrong method": Bad(405, method="GET"),
    "wrong path": Bad(404, path="/v2/search"),
    "a file of the machine": Bad(404, path="/../../../../etc/passwd", method="GET"),
    "a file, its dots hidden": Bad(404, path="/%2e%2e/%2e%2e/etc/passwd", method="GET"),
    "wrong content type": Bad(415, what=as_text(GOOD, "image/png")),
    "no content type": Bad(415, what={"content": GOOD}),
    "a form without a boundary": Bad(400, what=as_text(b"--x\r\n", "multipart/form-data")),
    "a form that breaks off": Bad(400, what=as_text(BROKEN_FORM, "multipart/form-data; boundary=x")),
    "another name for the host": Bad(403, what=as_json(images=[TEXT]) | {"headers": {"host": "evil.example"}}),
}


def check_refused(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, response.text[:300]
    assert response.text.rstrip("\n").count("\n") == 0
    answer = response.json()
    assert list(answer) == ["error"]
    assert 0 < len(answer["error"]) <= 400
    assert "\n" not in answer["error"]
    assert "root:" not in response.text


def check_answers(service: Service) -> None:
    found = service.client.post("/v1/search", json={"images": [TEXT], "k": 3}).raise_for_status().json()["results"]
    assert len(found[0]) == 3


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_in_one_line(service: Service, name: str) -> None:
    bad = BAD[name]
    check_refused(service.client.request(bad.method, bad.path, **bad.what), bad.status)
    check_answers(service)


def raw(service: Service, *pieces: bytes, seconds: float = 0.0) -> bytes:
    """Return the service's response to pieces sent `seconds` apart, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=40) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(seconds)
        except OSError:
            pass
        said = b""
        try:
            while data := connection.recv(65536):
                said += data
        except ConnectionResetError:
            pass
    return said


def body_of(said: bytes) -> dict[str, str]:
    answer: dict[str, str] = json.loads(said.partition(b"\r\n\r\n")[2])
    return answer


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("name", ["body stops", "headers stop", "says nothing", "no HTTP", "endless headers", "endless body"])
def test_a_bad_client_is_given_up(service: Service, name: str) -> None:
    """A bad client occupies a connection for some seconds but no replica; others are answered meanwhile and afterwards."""
    head = b"POST /v1/search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    begun = time.monotonic()
    if name == "body stops":
        said, status = raw(service, head + b"content-length: 1000\r\n\r\n{"), 408
    elif name == "headers stop":
        said, status = raw(service, head), 408
    elif name == "says nothing":
        said, status = raw(service), 408
    elif name == "no HTTP":
        said, status = raw(service, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"), 400
    elif name == "endless headers":
        said, status = raw(service, head + b"x-long: " + b"a" * 200_000), 400
    else:
        piece = b"100000\r\n" + bytes(0x100000) + b"\r\n"
        said, status = raw(service, head + b"transfer-encoding: chunked\r\n\r\n", *[piece] * 70), 413
    assert said.startswith(f"HTTP/1.1 {status} ".encode()), said[:200]
    assert list(body_of(said)) == ["error"]
    assert time.monotonic() - begun < limits.QUIET_SECONDS + 10
    check_answers(service)


@pytest.mark.slow
@pytest.mark.proof
def test_slow_clients_do_not_keep_others_waiting(service: Service) -> None:
    """More clients than are served at a time send part of a body and stop; good requests are still answered."""
    slow = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(limits.REQUESTS + 50)]
    for connection in slow:
        connection.sendall(b"POST /v1/search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{")
    for _ in range(5):
        check_answers(service)
    for connection in slow:
        connection.close()


@pytest.mark.slow
@pytest.mark.proof
def test_a_token_is_required_of_what_it_protects(made: Made, start: Callable[..., Service]) -> None:
    service = start(str(made.index), "--host", "0.0.0.0", token=TOKEN)
    wrong = [None, "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer \xe4\xf6"]
    for header in wrong:
        headers = {} if header is None else {"authorization": header.encode("latin-1")}
        for method, path in [
            ("POST", "/v1/search"),
            ("POST", "/v1/embed"),
            ("GET", "/v1/neighbours?position=0"),
            ("GET", "/metrics"),
            ("GET", "/nothing"),
        ]:
            check_refused(service.client.request(method, path, headers=headers), 401)
    right = {"authorization": f"Bearer {TOKEN}"}
    assert service.client.post("/v1/search", json={"images": [TEXT]}, headers=right).status_code == 200
    for path in ("/", "/docs", "/openapi.json"):
        assert service.client.get(path).status_code == 200
    assert service.client.get("/v1/health", headers={"host": "elsewhere.example"}).status_code == 200
    code, _ = service.end()
    assert code == 143
