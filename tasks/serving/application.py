"""The HTTP interface of the service: its paths, requests and responses; `pages` has what a browser shows. Refusals are HTTPExceptions."""

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated, Any, Self, TypeVar

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser

from dml_core.network_description import Metric
from tasks.serving import limits, metrics, pages
from tasks.serving.replica import Hit
from tasks.serving.replicas import Replicas

RequestT = TypeVar("RequestT", bound="EmbedRequest")
MOST_COMMAS = 4 * limits.IMAGES  # of JSON: one after each image and in its `data:` URL, and some
STATUS = {"json_invalid": 400, "bytes_invalid_encoding": 400, "too_long": 413}  # of pydantic's errors; 422 for all others
DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
MultiPartParser.spool_max_size = limits.BODY_BYTES  # files of forms stay in memory, as their body is; others go to the disk from 1 MB on


def _without_prefix(image: Any) -> Any:
    """Return the base64 text of a `data:` URL, and any other value unchanged."""
    if not isinstance(image, str) or image[:5].lower() != "data:":
        return image
    prefix = DATA_URL.match(image)
    if prefix is None:
        raise PydanticCustomError("bytes_invalid_encoding", "a data: URL must contain its image in base64")
    return image[prefix.end() :]


# Not strict, since what a validator returns counts as Python's text, in which strict mode sees no bytes.
EncodedImage = Annotated[bytes, Strict(False), BeforeValidator(_without_prefix)]
Neighbours = Annotated[int, Field(ge=1, le=limits.NEIGHBOURS, description="Number of neighbours.")]
Thumbnails = Annotated[bool, Field(description="Whether to return thumbnails of the hits.")]


class EmbedRequest(BaseModel):
    """Images to embed."""

    model_config = ConfigDict(extra="forbid", strict=True, val_json_bytes="base64", ser_json_bytes="base64")
    images: list[EncodedImage] = Field(
        min_length=1, max_length=limits.IMAGES, description="Image files in base64, with or without the prefix of a data: URL."
    )


class SearchRequest(EmbedRequest):
    """Images to search with."""

    k: Annotated[Neighbours, Field(description=f"Number of neighbours; times the number of images at most {limits.HITS:,}.")] = 10
    thumbnails: Thumbnails = False

    @model_validator(mode="after")
    def _few_hits(self) -> Self:
        if len(self.images) * self.k > limits.HITS:
            shown = f"{len(self.images)} images with k {self.k} are more than {limits.HITS:,} hits; send fewer images, or a smaller k"
            raise PydanticCustomError("too_many_hits", shown)
        return self


class NeighboursRequest(BaseModel):
    """An item of the index to search with."""

    model_config = ConfigDict(extra="forbid")
    position: Annotated[int, Field(ge=0, description="Position of the item, as hits have it.")]
    index: Annotated[str | None, Field(description="Version of the index that has it there; another one is refused.")] = None
    k: Neighbours = 10
    thumbnails: Thumbnails = False


class EmbedResponse(BaseModel):
    """Embeddings, one row per image, in the order of the images."""

    embeddings: list[list[float]]
    num_dimensions: int
    model: str = Field(description="Identity of the network; embeddings of different networks cannot be compared.")


class SearchResponse(BaseModel):
    """The hits of each image, nearest first."""

    results: tuple[tuple[Hit, ...], ...]
    model: str
    index: str | None = Field(description="Version of the index: a change may move its items to other positions.")


class Health(BaseModel):
    """Status of the service, and what it serves."""

    model: str
    title: str
    num_dimensions: int
    metric: Metric = Field(description="Metric of the search.")
    num_items: int | None = Field(description="Number of items in the index; null if the service has no index.")
    index: str | None = Field(description="Version of the index.")
    status: str = "ok"
    images: int = Field(default=limits.IMAGES, description="Maximum number of images in one request.")


class Problem(BaseModel):
    """Reason why a request was refused, as one line."""

    error: str


def make_app(served: Health, replicas: Replicas, has_token: bool) -> FastAPI:
    """Return the application, which must be put behind a `Guard`; if that requires a token, OpenAPI's description has a security scheme."""
    app = FastAPI(
        title="dml serve",
        description="Embeddings of images, and the images of an index that are nearest to them.",
        version="1",
        docs_url=None,  # its page would load scripts from another site; `pages` has one that loads nothing
        redoc_url=None,
        responses={"4XX": {"model": Problem}, "5XX": {"model": Problem}},
    )
    token = [Depends(HTTPBearer(scheme_name="token", auto_error=False))] if has_token else []  # describes; the guard checks

    @app.get("/", include_in_schema=False)
    async def show_search() -> HTMLResponse:
        page, policy = pages.search_page()
        return HTMLResponse(page, headers={"content-security-policy": policy})

    @app.get("/docs", include_in_schema=False)
    async def show_interface(request: Request) -> HTMLResponse:
        page, policy = pages.interface_page(app.openapi(), str(request.base_url).rstrip("/"))
        return HTMLResponse(page, headers={"content-security-policy": policy})

    @app.get("/v1/health")
    async def health() -> Health:
        """Check that a replica answers and can compute."""
        if not await replicas.check():
            raise HTTPException(503, "no replica answers, or its computations fail; see the service's log")
        return served

    @app.post("/v1/embed", openapi_extra=_body_schema(EmbedRequest), dependencies=token)
    async def embed(request: Request) -> EmbedResponse:
        """Embed images."""
        wanted = await _read_request(request, EmbedRequest)
        answer = await replicas.answer(wanted.images)
        assert answer.embeddings is not None
        return EmbedResponse(embeddings=answer.embeddings.tolist(), num_dimensions=served.num_dimensions, model=served.model)

    @app.post("/v1/search", openapi_extra=_body_schema(SearchRequest), dependencies=token)
    async def search(request: Request) -> SearchResponse:
        """Find the items of the index that are nearest to images."""
        _num_items(served)
        wanted = await _read_request(request, SearchRequest)
        answer = await replicas.answer(wanted.images, wanted.k, wanted.thumbnails)
        return SearchResponse(results=answer.hits, model=served.model, index=served.index)

    @app.get("/v1/neighbours", dependencies=token)
    async def neighbours(
        wanted: Annotated[NeighboursRequest, Query()],
    ) -> SearchResponse:
        """Find the items of the index that are nearest to one of its items, without that item."""
        num_items = _num_items(served)
        if wanted.index not in (None, served.index):
            raise HTTPException(409, "the index was changed since, and its items have other positions; search with an image again")
        if wanted.position >= num_items:
            raise HTTPException(404, f"position {wanted.position}: the index has {num_items} items, from 0 to {num_items - 1}")
        answer = await replicas.neighbours(wanted.position, wanted.k, wanted.thumbnails)
        return SearchResponse(results=answer.hits, model=served.model, index=served.index)

    @app.get("/metrics", response_class=PlainTextResponse, dependencies=token)
    async def read_metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(metrics.REGISTRY), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> JSONResponse:
        return limits.refusal(error)

    @app.exception_handler(RequestValidationError)
    async def refuse_value(_: Request, error: RequestValidationError) -> JSONResponse:
        return limits.refusal(_as_refusal(error.errors()))

    @app.exception_handler(Exception)
    async def report_bug(_: Request, __: Exception) -> JSONResponse:
        return limits.refusal(HTTPException(500, "internal error; see the service's log"))

    return app


def _num_items(served: Health) -> int:
    """Return the number of items of the index, if there is one."""
    if served.num_items is None:
        raise HTTPException(404, "the service has no index to search, only a model; start it with an index")
    return served.num_items


async def _read_request(request: Request, kind: type[RequestT]) -> RequestT:
    """Return a request's encoded images, each checked against the limits, and its other fields."""
    for name in request.query_params:
        raise HTTPException(422, f"{name}: send it as a field of the body, not in the address")
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if content_type == "application/json":
            if (await request.body()).count(b",") > MOST_COMMAS:  # pydantic takes 80 bytes for each byte of a list, or of unknown fields
                raise HTTPException(413, f"too many images or fields; the limit is {limits.IMAGES} images")
            wanted = await run_in_threadpool(kind.model_validate_json, await request.body())
        elif content_type == "multipart/form-data":
            await request.body()
            fields = await run_in_threadpool(asyncio.run, _read_form(request))  # in memory, it waits for nothing
            wanted = kind.model_validate(fields, strict=False)  # the fields of a form are text
        else:
            raise HTTPException(415, "send application/json with the images in base64, or multipart/form-data with files named image")
    except ValidationError as error:
        raise _as_refusal(error.errors(include_url=False, include_input=False)) from None
    pixels = [await run_in_threadpool(limits.check_image, data, f"image {number}") for number, data in enumerate(wanted.images, 1)]
    if sum(pixels) > limits.REQUEST_PIXELS:
        raise HTTPException(413, f"{sum(pixels)} pixels of all images; the limit is {limits.REQUEST_PIXELS}: send fewer images")
    return wanted


def _as_refusal(problems: Sequence[Any]) -> HTTPException:
    """Return the first of pydantic's errors as a refusal."""
    where = ".".join(str(part) for part in problems[0]["loc"])
    return HTTPException(STATUS.get(problems[0]["type"], 422), f"{where}: {problems[0]['msg']}" if where else problems[0]["msg"])


async def _read_form(request: Request) -> dict[str, Any]:
    """Return the files named `image` of a form as `images`, and its other fields."""
    images: list[bytes] = []
    fields: dict[str, Any] = {"images": images}
    try:
        async with request.form(max_files=limits.IMAGES, max_fields=8, max_part_size=1000) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile) != (name == "image"):
                    raise HTTPException(400, "send images, and nothing else, as files named image")
                if isinstance(value, UploadFile):
                    images.append(await value.read())
                elif name in fields:
                    raise HTTPException(400, f"{name}: given twice")
                else:
                    fields[name] = value
    except HTTPException as error:
        raise HTTPException(413 if "Too many files" in error.detail else error.status_code, error.detail) from None
    except Exception:  # noqa: BLE001 - the form parser raises anything on invalid bytes
        raise HTTPException(400, "the form cannot be parsed") from None
    if not images:
        raise HTTPException(400, "no image was sent")
    return fields


def _body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return a request's body for OpenAPI: JSON, or a form with the same fields."""
    schema = kind.model_json_schema()
    files = {"type": "array", "items": {"type": "string", "format": "binary"}, "description": "One or more image files."}
    fields = {name: field for name, field in schema["properties"].items() if name != "images"}
    form = {"type": "object", "required": ["image"], "properties": {"image": files, **fields}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}}}
