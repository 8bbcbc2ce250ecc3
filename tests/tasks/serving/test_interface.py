"""The HTTP interface in process, without a server: `data:` URLs, neighbours of items, the OpenAPI description and its page."""

import asyncio
import base64
import io
import re
import tempfile
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.testclient import TestClient

from dml_core.index.index import Index
from dml_core.trained import TrainedModel
from tasks.serving import limits
from tasks.serving.application import EmbedRequest, make_app
from tasks.serving.guard import Guard
from tasks.serving.pages import interface_page
from tasks.serving.ray_replicas import RayReplica
from tasks.serving.replica import Replica
from tasks.serving.replicas import Replicas
from tasks.serving.service import LOCAL_NAMES, describe_service
from tests.tasks.serving.conftest import Made


@pytest.fixture(scope="module")
def client(made: Made) -> Callable[..., TestClient]:
    """Return a function that makes clients of the application, with or without index and token."""
    model, index = made.load(), Index.open(made.index)

    def make(has_index: bool = True, has_token: bool = False) -> TestClient:
        used = index if has_index else None
        return TestClient(make_app(describe_service(model, used), Replicas(Replica(model, used, 1, 32)), has_token))

    return make


def test_the_metric_of_the_search_is_the_index_s(made: Made) -> None:
    model, index = made.load(), Index.open(made.index)
    euclidean = TrainedModel(model.description.model_copy(update={"metric": "euclidean"}), model.identity, lambda views: views)
    assert (describe_service(euclidean, None).metric, describe_service(euclidean, index).metric) == ("euclidean", "cosine")


@pytest.mark.parametrize("token", ["letters and digits 1234", "ends with à", "ends with \u00a0"])
def test_a_token_is_compared_byte_by_byte(client: Callable[..., TestClient], token: str) -> None:
    """HTTP headers have bytes, and the last one of "à" is a space in Latin-1."""
    guarded = TestClient(Guard(client().app, token, None))
    for sent, status in ((token, 200), (f" {token} ", 200), (f"{token}x", 401), (token[:-1], 401)):
        answer = guarded.get("/v1/neighbours", params={"position": 0}, headers={"Authorization": f"Bearer {sent}".encode()})
        assert answer.status_code == status, sent


ORIGINS = {
    None: 200,
    "http://127.0.0.1:8321": 200,
    "http://LocalHost": 200,
    "http://[::1]:8321": 200,
    "https://evil.example": 403,
    "http://localhost.evil.example:8321": 403,
    "http://127.0.0.1.evil.example": 403,
    "null": 403,
    "file://": 403,
    "": 403,
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_page_of_another_site_cannot_post_to_loopback(client: Callable[..., TestClient], made: Made, origin: str | None) -> None:
    """A browser sends forms without asking the service first, and hides the answer only."""
    guarded = TestClient(Guard(client().app, None, LOCAL_NAMES), "http://127.0.0.1:8321")
    headers = {} if origin is None else {"origin": origin}
    answer = guarded.post("/v1/search", files={"image": made.files[0].read_bytes()}, headers=headers)
    assert answer.status_code == ORIGINS[origin], answer.text


@pytest.mark.parametrize(
    "body",
    ['{"images": [' + "0," * 100_000 + "0]}", '{"images": ["aaaa"], ' + ",".join(f'"{number}": 0' for number in range(100_000)) + "}"],
    ids=["images", "fields"],
)
def test_a_request_of_many_parts_is_refused_unread(client: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Read, it would take 80 times its size in memory."""
    monkeypatch.setattr(EmbedRequest, "model_validate_json", lambda _: pytest.fail("the request was read"))
    refused = client().post("/v1/search", content=body, headers={"content-type": "application/json"})
    assert (refused.status_code, refused.json()) == (413, {"error": "too many images or fields; the limit is 64 images"})


def test_the_pixels_of_all_images_of_a_request_are_limited(client: Callable[..., TestClient]) -> None:
    """A network without a crop holds them all at a time."""
    file = io.BytesIO()
    Image.new("L", (7000, 7000)).save(file, "PNG")
    refused = client().post("/v1/embed", files=[("image", file.getvalue())] * 17)
    assert (refused.status_code, refused.json()["error"]) == (
        413,
        "833000000 pixels of all images; the limit is 800000000: send fewer images",
    )


def test_as_many_images_as_allowed_are_accepted_in_their_longest_form(client: Callable[..., TestClient], made: Made) -> None:
    images = [data_url(made.files[number % 8].read_bytes(), 'data:image/png;name="a b";base64,') for number in range(limits.IMAGES)]
    answer = client().post("/v1/search", json={"images": images, "k": 1, "thumbnails": False}).raise_for_status()
    assert len(answer.json()["results"]) == limits.IMAGES


def test_only_the_beginning_of_a_long_reason_is_escaped() -> None:
    """A field's name in it may have the size of a body."""
    tracemalloc.start()
    limits.refusal(HTTPException(422, "x" * 1_000_000))
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def data_url(data: bytes, prefix: str) -> str:
    return prefix + base64.b64encode(data).decode()


def test_a_large_file_of_a_form_needs_no_disk(client: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)).save(file, "PNG")
    assert len(file.getvalue()) > 1_000_000
    monkeypatch.setattr(tempfile, "TemporaryFile", None)  # the disk is full
    assert client().post("/v1/embed", files={"image": ("a.png", file.getvalue())}).status_code == 200


@pytest.mark.parametrize("slow", ["the image", "the form"])
def test_others_are_answered_while_a_request_is_checked(made: Made, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    answered = threading.Event()
    check, parse = limits.check_image, MultiPartParser.parse

    def check_slowly(data: bytes, name: str) -> int:
        assert slow != "the image" or answered.wait(20)
        return check(data, name)

    async def parse_slowly(parser: MultiPartParser) -> FormData:
        assert slow != "the form" or answered.wait(20)
        return await parse(parser)

    monkeypatch.setattr(limits, "check_image", check_slowly)
    monkeypatch.setattr(MultiPartParser, "parse", parse_slowly)
    model = made.load()
    app = make_app(describe_service(model, None), Replicas(Replica(model, None, 1, 32)), has_token=False)

    async def ask() -> tuple[int, int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as browser:
            request = asyncio.create_task(browser.post("/v1/embed", files={"image": made.files[0].read_bytes()}))
            await asyncio.sleep(0.5)
            health = await browser.get("/v1/health")
            answered.set()
            return health.status_code, (await request).status_code

    assert asyncio.run(ask()) == (200, 200)


@pytest.mark.parametrize("path", ["/v1/embed", "/v1/neighbours"])
def test_a_service_that_cannot_compute_is_not_healthy_until_it_can(made: Made, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    model, index = made.load(), Index.open(made.index)

    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    replica = RayReplica(str(made.model), str(made.index), (model.identity, model.weights_sha256, index.info.version), 1, 32)
    app = TestClient(make_app(describe_service(model, index), Replicas(replica), has_token=False), raise_server_exceptions=False)

    def ask() -> int:
        if path == "/v1/neighbours":
            return app.get(path, params={"position": 0}).status_code
        return app.post(path, files={"image": made.files[0].read_bytes()}).status_code

    assert (ask(), app.get("/v1/health").status_code) == (200, 200)
    with monkeypatch.context() as patch:
        patch.setattr(replica._model, "try_views", broken)
        patch.setattr(replica._index, "search", broken)
        assert [ask(), app.get("/v1/health").status_code, app.get("/v1/health").status_code] == [500, 503, 503]
        with pytest.raises(RuntimeError, match="computations fail"):
            asyncio.run(replica.check_health())
    assert (app.get("/v1/health").status_code, ask()) == (200, 200)
    asyncio.run(replica.check_health())


def test_a_request_for_too_many_hits_is_refused(client: Callable[..., TestClient], made: Made) -> None:
    """64 images with k 1000 would have an answer of 400 MB with thumbnails; each number is within its own limit."""
    images = [data_url(made.files[1].read_bytes(), "")] * 50
    assert client().post("/v1/search", json={"images": images, "k": 100}).status_code == 200
    files = [("image", ("a.png", made.files[1].read_bytes()))] * 50
    for sent in ({"json": {"images": images, "k": 101}}, {"files": files, "data": {"k": "101"}}):
        refused = client().post("/v1/search", **sent)
        assert refused.status_code == 422
        assert refused.json() == {"error": "50 images with k 101 are more than 5,000 hits; send fewer images, or a smaller k"}


@pytest.mark.parametrize(
    "prefix", ["", "data:image/png;base64,", "data:;base64,", "DATA:image/png;charset=utf-8;BASE64,", "data:image/png;name=a b;base64,"]
)
def test_an_image_in_base64_may_be_a_data_url(client: Callable[..., TestClient], made: Made, prefix: str) -> None:
    data = made.files[1].read_bytes()
    answer = client().post("/v1/embed", json={"images": [data_url(data, prefix)]})
    np.testing.assert_allclose(answer.raise_for_status().json()["embeddings"], made.load().embed([data]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("image", "status"),
    [
        ("data:image/png,%89PNG", 400),  # not base64
        ("data:image/png;base64", 400),  # no comma
        ("data:image/png;base64,%%%", 400),
        ("data:text/plain;base64,aGVsbG8=", 422),  # valid, and no image
        ("data:image/png;base64,", 422),
        ("https://example.org/a.png", 400),
        (7, 422),
        (None, 422),
        ({"data": "x"}, 422),
    ],
)
def test_any_other_image_is_refused_in_one_line(client: Callable[..., TestClient], image: Any, status: int) -> None:
    refused = client().post("/v1/embed", json={"images": [image]})
    assert refused.status_code == status, refused.text
    assert list(refused.json()) == ["error"]
    assert "\n" not in refused.json()["error"]


@pytest.mark.parametrize("position", [0, 17, 39])
def test_neighbours_of_an_item_are_the_index_s_without_the_item(client: Callable[..., TestClient], made: Made, position: int) -> None:
    index = Index.open(made.index)
    cosines = index.vectors_ND @ index.vectors_ND[position]
    expected = [place for place in np.argsort(-cosines, kind="stable").tolist() if place != position]
    (hits,) = client().get("/v1/neighbours", params={"position": position, "k": 5}).raise_for_status().json()["results"]
    assert [hit["position"] for hit in hits] == expected[:5]
    np.testing.assert_allclose([hit["score"] for hit in hits], cosines[expected[:5]], rtol=0, atol=1e-5)
    assert [hit["thumbnail"] for hit in hits] == [None] * 5
    (hits,) = client().get(f"/v1/neighbours?position={position}&k=1000&thumbnails=true").json()["results"]
    assert sorted(hit["position"] for hit in hits) == sorted(expected)
    assert all(hit["thumbnail"].startswith("data:image/webp;base64,") for hit in hits)


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("position=40", 404, "from 0 to 39"),
        ("position=99999999999999999999", 404, "from 0 to 39"),
        ("position=-1", 422, "position"),
        ("position=one", 422, "position"),
        ("", 422, "position"),
        ("position=1&k=0", 422, "k"),
        ("position=1&k=1001", 422, "k"),
        ("position=1&thumbnails=perhaps", 422, "thumbnails"),
        ("position=1&thumbnail=true", 422, "thumbnail: "),
        ("position=1&index=0123456789ab", 409, "other positions"),
    ],
)
def test_a_wrong_position_is_refused_in_one_line(client: Callable[..., TestClient], query: str, status: int, says: str) -> None:
    refused = client().get(f"/v1/neighbours?{query}")
    assert (refused.status_code, list(refused.json())) == (status, ["error"])
    assert says in refused.json()["error"]
    assert "\n" not in refused.json()["error"]


def test_a_position_is_of_the_version_of_the_index_that_was_searched(client: Callable[..., TestClient], made: Made) -> None:
    image = {"image": made.files[0].read_bytes()}
    answer = client().post("/v1/search", files=image).json()
    assert answer["index"] == client().get("/v1/health").json()["index"] == Index.open(made.index).info.version
    assert client().get("/v1/neighbours", params={"position": 1, "index": answer["index"]}).json()["index"] == answer["index"]


@pytest.mark.parametrize("path", ["/v1/search", "/v1/embed"])
def test_a_field_in_the_address_of_a_request_with_a_body_is_refused(client: Callable[..., TestClient], made: Made, path: str) -> None:
    """It would have no effect."""
    refused = client().post(f"{path}?k=5", files={"image": made.files[0].read_bytes()})
    assert (refused.status_code, refused.json()) == (422, {"error": "k: send it as a field of the body, not in the address"})


def test_without_an_index_there_are_no_neighbours(client: Callable[..., TestClient]) -> None:
    for refused in (client(has_index=False).get("/v1/neighbours?position=0"), client(has_index=False).post("/v1/search", json={})):
        assert refused.status_code == 404
        assert "no index" in refused.json()["error"]


def test_the_description_names_the_token_of_each_protected_route(client: Callable[..., TestClient]) -> None:
    """A generated client sends the token only if the description requires it; test_bad_input.py checks the guard itself."""
    described = client(has_token=True).get("/openapi.json").json()
    (name,) = described["components"]["securitySchemes"]
    assert described["components"]["securitySchemes"][name] == {"type": "http", "scheme": "bearer"}
    protected = {path for path, methods in described["paths"].items() for operation in methods.values() if "security" in operation}
    assert protected == {"/v1/embed", "/v1/search", "/v1/neighbours", "/metrics"}
    assert all(
        operation["security"] == [{name: []}]
        for path, methods in described["paths"].items()
        for operation in methods.values()
        if path in protected
    )
    assert "security" not in client().get("/openapi.json").text


@pytest.mark.parametrize("has_token", [False, True])
def test_the_page_of_the_interface_has_every_route_and_field_and_loads_nothing(client: Callable[..., TestClient], has_token: bool) -> None:
    answer = client(has_token=has_token).get("/docs").raise_for_status()
    described = client(has_token=has_token).get("/openapi.json").json()
    for path, methods in described["paths"].items():
        assert all(f"{method.upper()} {path}</code>" in answer.text for method in methods)
    for name, schema in described["components"]["schemas"].items():
        assert f'id="{name}"' in answer.text
        assert all(f"<code>{field}</code>" in answer.text for field in schema["properties"])
    assert ("Authorization: Bearer" in answer.text) == has_token
    assert set(re.findall(r"https?://[^/\s'<]+", answer.text)) == {"http://testserver"}, "addresses of its own examples alone"
    assert "<script" not in answer.text
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "script-src" not in policy


def test_a_host_name_in_the_page_is_escaped(client: Callable[..., TestClient]) -> None:
    page, _ = interface_page(client().get("/openapi.json").json(), "http://a<script>alert(1)</script>")
    assert "<script" not in page
