"""The HTTP interface of the service: its paths, requests and responses, and the page at `/`."""

import base64
import binascii
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from tasks.serving.guard import Measures
from tasks.serving.limits import Limits, RefusedError, check_image

PAGE = Path(__file__).parent / "page"
LONGEST_LINE = 300


class Backend(Protocol):
    """The replicas' interface: `embed` returns float32 rows, `search` each image's hits; both raise `RefusedError`."""

    async def embed(self, images: list[bytes]) -> Any: ...  # noqa: D102
    async def search(self, images: list[bytes], k: int, with_thumbnails: bool) -> Any: ...  # noqa: D102
    async def check(self) -> bool: ...  # noqa: D102


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class EmbedRequest(_Strict):
    """Images to embed."""

    images: list[str] = Field(min_length=1, description="Base64-encoded image files.")


class SearchRequest(EmbedRequest):
    """Images to search with."""

    k: int = Field(10, ge=1, description="Number of neighbours per image.")
    thumbnails: bool = Field(False, description="Whether to return thumbnails of the hits.")


class EmbedResponse(BaseModel):
    """Embeddings, one row per image, in the order of the images."""

    embeddings: list[list[float]]
    num_dimensions: int
    model: str = Field(description="Identity of the network; embeddings of different networks cannot be compared.")


class Hit(BaseModel):
    """An item that was found."""

    position: int = Field(description="Position in the index, from 0.")
    score: float = Field(description="Larger is nearer: the cosine, or minus the distance.")
    name: str
    class_name: str | None
    thumbnail: str | None = Field(None, description="A data: URL, if requested and available.")


class SearchResponse(BaseModel):
    """The hits of each image, nearest first."""

    results: list[list[Hit]]
    model: str


class Health(BaseModel):
    """Status of the service, and what it serves."""

    status: str = "ok"
    model: str
    title: str
    num_dimensions: int
    num_items: int | None = Field(description="Number of items in the index; null if the service has no index.")
    images: int = Field(description="Maximum number of images in one request.")


class Problem(BaseModel):
    """Reason why a request was refused, as one line."""

    error: str


class Served(BaseModel):
    """Facts about the network, and the number of the index's items, or None without an index."""

    model: str
    title: str
    num_dimensions: int
    num_items: int | None


def make_app(served: Served, backend: Backend, limits: Limits, measures: Measures) -> FastAPI:
    """Return the application, which must be put behind a `Guard`."""
    app = FastAPI(
        title="dml serve",
        description="Embeddings of images, and the images of an index that are nearest to them.",
        version="1",
        docs_url=None,  # its page would load scripts from another site
        redoc_url=None,
        responses={"4XX": {"model": Problem}, "5XX": {"model": Problem}},
    )
    page, policy = read_page()

    @app.get("/", include_in_schema=False)
    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    @app.get("/v1/health")
    async def health() -> Health:
        """Check that a replica answers."""
        if not await backend.check():
            raise RefusedError(503, "no replica answers")
        return Health(**served.model_dump(), images=limits.images)

    @app.post("/v1/embed", openapi_extra=_takes(EmbedRequest, ()))
    async def embed(request: Request) -> EmbedResponse:
        """Embed images."""
        images, _ = await _images(request, EmbedRequest, limits)
        rows = await backend.embed(images)
        return EmbedResponse(embeddings=rows.tolist(), num_dimensions=served.num_dimensions, model=served.model)

    @app.post("/v1/search", openapi_extra=_takes(SearchRequest, ("k", "thumbnails")))
    async def search(request: Request) -> SearchResponse:
        """Find the items of the index that are nearest to the images."""
        if served.num_items is None:
            raise RefusedError(404, "the service has no index to search, only a model; start it with an index")
        images, asked = await _images(request, SearchRequest, limits)
        assert isinstance(asked, SearchRequest)
        if asked.k > limits.neighbours:
            raise RefusedError(422, f"k: {asked.k} neighbours; the limit is {limits.neighbours}")
        found = await backend.search(images, asked.k, asked.thumbnails)
        return SearchResponse(results=[[_shown(hit) for hit in hits] for hits in found], model=served.model)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(measures.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> JSONResponse:
        line = _safe(f"{error.detail}: {request.method} {request.url.path}")
        return JSONResponse({"error": line}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_values(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": _safe(str(error.errors()[0]["msg"]))}, 422)

    @app.exception_handler(RefusedError)
    async def refuse_more(_: Request, error: RefusedError) -> JSONResponse:
        return JSONResponse({"error": error.why}, error.status, {"retry-after": "1"} if error.status == 503 else None)

    return app


# ------------------------------------------------------------ what comes in


async def _images(request: Request, kind: type[EmbedRequest], limits: Limits) -> tuple[list[bytes], EmbedRequest]:
    """Return the encoded images of a request, each checked against the limits, and its other fields.

    Raises:
        RefusedError: 400, 413, 415 or 422.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json":
        body = await request.body()
        asked = await run_in_threadpool(_parsed, kind, body)
        _check_number(len(asked.images), limits)
        images = await run_in_threadpool(lambda: [_from_base64(text, f"image {number}") for number, text in enumerate(asked.images, 1)])
    elif content_type == "multipart/form-data":
        images, values = await _form(request, limits)
        asked = _parsed_form(kind, values)
    else:
        raise RefusedError(415, "send application/json with the images in base64, or multipart/form-data with files named image")
    for number, data in enumerate(images, 1):
        check_image(data, limits, f"image {number}")
    return images, asked


async def _form(request: Request, limits: Limits) -> tuple[list[bytes], dict[str, str]]:
    """Return the files called `image` of a form, and its other fields.

    Raises:
        RefusedError: the form is invalid.
    """
    images: list[bytes] = []
    values: dict[str, str] = {}
    try:
        async with request.form(max_files=limits.images, max_fields=8, max_part_size=1000) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile) and name == "image":
                    images.append(await value.read())
                elif isinstance(value, UploadFile):
                    raise RefusedError(400, "files in a form must be named image")
                elif name == "image":
                    raise RefusedError(400, "image: send a file, not text")
                elif name in values:
                    raise RefusedError(400, f"{_safe(name)}: given twice")
                else:
                    values[name] = value
    except HTTPException as error:
        too_many = "Too many files" in str(error.detail)
        raise RefusedError(413 if too_many else 400, _safe(str(error.detail))) from None
    except RefusedError:
        raise
    except Exception:  # noqa: BLE001 - the form parser raises anything on invalid bytes
        raise RefusedError(400, "the form cannot be parsed") from None
    _check_number(len(images), limits)
    return images, values


def _check_number(number: int, limits: Limits) -> None:
    if number == 0:
        raise RefusedError(400, "no image was sent")
    if number > limits.images:
        raise RefusedError(413, f"{number} images; the limit is {limits.images} per request")


def _parsed(kind: type[EmbedRequest], body: bytes) -> EmbedRequest:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        what = f"{where}: {problem['msg']}" if where else problem["msg"]
        raise RefusedError(400 if problem["type"] == "json_invalid" else 422, _safe(what)) from None


def _parsed_form(kind: type[EmbedRequest], values: dict[str, str]) -> EmbedRequest:
    """Parse the fields of a form, which are text, by the same rules as those of JSON."""
    given: dict[str, Any] = {"images": ["in the form's files"]}
    for name, text in values.items():
        if name == "k" and re.fullmatch(r"-?[0-9]{1,9}", text):
            given[name] = int(text)
        elif name == "thumbnails" and text in ("true", "false"):
            given[name] = text == "true"
        else:
            given[name] = text
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise RefusedError(422, _safe(f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}")) from None


def _from_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RefusedError(400, f"{name}: not valid base64") from None


def _safe(text: str) -> str:
    """Return the text as one line of printable characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:LONGEST_LINE]


def _takes(kind: type[EmbedRequest], fields: tuple[str, ...]) -> dict[str, Any]:
    """Return a request's body for OpenAPI: JSON, or a form with the same fields."""
    schema = kind.model_json_schema()
    files = {"type": "array", "items": {"type": "string", "format": "binary"}, "description": "One or more image files."}
    form = {
        "type": "object",
        "required": ["image"],
        "properties": {"image": files, **{name: schema["properties"][name] for name in fields}},
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}}}


# ------------------------------------------------------------ what goes out


def _shown(hit: Any) -> Hit:
    picture = None if hit.thumbnail is None else "data:image/webp;base64," + base64.b64encode(hit.thumbnail).decode()
    return Hit(position=hit.position, score=hit.score, name=hit.name, class_name=hit.class_name, thumbnail=picture)


@cache
def read_page() -> tuple[str, str]:
    """Return the page at `/`, a single file, and a Content-Security-Policy that allows only its own script and style."""
    style, script = ((PAGE / name).read_text() for name in ("page.css", "page.js"))
    page = (PAGE / "page.html").read_text().replace("/* page.css */", style).replace("/* page.js */", script)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; img-src data: blob:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy
