"""Access control before the application: who may send requests, how large and how slowly; every refusal is one line.

This runs in the process that owns the socket, so that bodies are counted as they arrive and slow clients are dropped. A request reaches the
application only when it is complete, so a replica never waits for a client.
"""

import asyncio
import hmac
import json
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import h11
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from uvicorn.protocols.http.h11_impl import H11Protocol

from tasks.serving.limits import Limits, RefusedError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/v1/health")  # a token would protect nothing there
KNOWN_PATHS = (*OPEN_PATHS, "/v1/embed", "/v1/search", "/metrics", "/openapi.json")
LINGER_SECONDS = 2.0  # a refused client reads its answer only after sending for a while
SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class Measures:
    """Metrics for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("path", "status")
        self.requests = Counter("dml_requests", "Requests that were answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "dml_request_seconds", "Seconds from a request's headers to its response.", ["path"], buckets=SECONDS, registry=self.registry
        )
        self.images = Counter("dml_images", "Images that went through the network.", registry=self.registry)
        self.batches = Histogram("dml_batch_images", "Images per batch of the network.", buckets=SIZES, registry=self.registry)
        self.retries = Counter("dml_retries", "Requests sent to another replica because theirs died.", registry=self.registry)
        self.errors = Counter("dml_errors", "Requests that failed because of an error in the service.", registry=self.registry)
        self.open = Gauge("dml_requests_open", "Requests in progress.", registry=self.registry)
        ProcessCollector(registry=self.registry)


class Guard:
    """An ASGI application that checks requests before another one.

    Args:
        app: application to protect.
        limits: limits on a request.
        token: token that requests must contain (`Authorization: Bearer ...`), or None.
        hosts: host names that requests may use, or None for any: on loopback this blocks pages of other sites whose name was made to
            resolve to this machine.
        measures: counts every request.
    """

    def __init__(self, app: App, limits: Limits, token: str | None, hosts: frozenset[str] | None, measures: Measures) -> None:
        self._app = app
        self._limits = limits
        self._token = token
        self._hosts = hosts
        self._measures = measures
        self._num_working = self._num_held_bytes = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http"
        begun = time.perf_counter()
        response = _Response(send)
        body = bytearray()
        self._measures.open.inc()
        try:
            self._check(scope)
            await self._read(scope, receive, body)
            await self._work(scope, _replay(body, receive), response)
        except RefusedError as refused:
            await response.refuse(refused, None if _expects_continue(scope) else receive)
        except _GoneError:
            response.status = 499
        except Exception:  # noqa: BLE001 - the client gets one line for any error, and the log the rest
            self._measures.errors.inc()
            traceback.print_exc()
            await response.refuse(RefusedError(500, "internal error; see the service's log"), None)
        finally:
            self._num_held_bytes -= len(body)
            self._measures.open.dec()
            path = scope["path"] if scope["path"] in KNOWN_PATHS else "other"
            self._measures.requests.labels(path, response.status).inc()
            self._measures.seconds.labels(path).observe(time.perf_counter() - begun)

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        """Check the client, and the size stated in the headers.

        Raises:
            RefusedError: the request must not be answered.
        """
        headers = dict(scope["headers"])
        if self._hosts is not None and _host(headers.get(b"host", b"")) not in self._hosts:
            raise RefusedError(403, "unknown Host header; listening on loopback, the service answers only to localhost")
        if self._token is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token.encode()):
                raise RefusedError(401, "a token is required: send it as the header Authorization: Bearer TOKEN")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.body_bytes:
            raise RefusedError(413, f"request body of {int(length)} bytes; the limit is {self._limits.body_bytes}")

    async def _work(self, scope: MutableMapping[str, Any], receive: Receive, response: Send) -> None:
        """Have the application answer. A request counts only from here on: requests still being received block no others.

        Raises:
            RefusedError: too many requests are in progress.
        """
        if self._num_working >= self._limits.requests:
            raise RefusedError(503, "too many concurrent requests; retry in a moment")
        self._num_working += 1
        try:
            await self._app(scope, receive, response)
        finally:
            self._num_working -= 1

    async def _read(self, scope: MutableMapping[str, Any], receive: Receive, body: bytearray) -> None:
        """Read the whole body.

        Raises:
            RefusedError: it is too large or too slow, or too much is being received at a time.
            _GoneError: the client has disconnected.
        """
        until = time.monotonic() + self._limits.body_seconds
        more = True
        while more:
            try:
                patience = min(self._limits.quiet_seconds, until - time.monotonic())
                message = await asyncio.wait_for(receive(), max(0.0, patience))
            except TimeoutError:
                raise RefusedError(408, "the request body arrived too slowly") from None
            if message["type"] == "http.disconnect":
                raise _GoneError
            piece = message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) + len(piece) > self._limits.body_bytes:
                raise RefusedError(413, f"request body of more than {self._limits.body_bytes} bytes")
            if self._num_held_bytes + len(piece) > self._limits.held_bytes:
                raise RefusedError(503, "too much data is being received; retry in a moment")
            body += piece
            self._num_held_bytes += len(piece)


class _GoneError(Exception):
    """The client has disconnected."""


class _Response:
    """Wraps `send`: adds the service's headers, and remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 500
        self._has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._has_begun = True
            named = {name for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(header for header in HEADERS if header[0] not in named)]
        await self._send(message)

    async def refuse(self, refused: RefusedError, receive: Receive | None) -> None:
        """Answer with one line, and close. First read briefly what the client still sends: if closed at once, it may lose the answer."""
        if self._has_begun:
            return
        line = json.dumps({"error": refused.why}).encode() + b"\n"
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(line)).encode()), (b"connection", b"close")]
        if refused.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refused.status == 503:
            headers.append((b"retry-after", b"1"))
        await self({"type": "http.response.start", "status": refused.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": line, "more_body": True})
        if receive is not None:
            try:
                async with asyncio.timeout(LINGER_SECONDS):
                    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
                        pass
            except TimeoutError:
                pass
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _replay(body: bytearray, receive: Receive) -> Receive:
    """Return a `receive` for a request whose body has already been read."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return replay


def _expects_continue(scope: MutableMapping[str, Any]) -> bool:
    """Return whether the client waits for permission to send its body."""
    return bool(dict(scope["headers"]).get(b"expect", b"").lower() == b"100-continue")


def _host(value: bytes) -> str:
    """Return the name in a Host header, without its port."""
    text = value.decode("latin-1").lower()
    return text[: text.index("]") + 1] if text.startswith("[") and "]" in text else text.partition(":")[0]


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a limit on the time for a request's headers, which uvicorn lacks.

    `head_seconds` is set by the caller.
    """

    head_seconds = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for headers when a client connects."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Update the time limit when bytes arrive: the headers may now be complete."""
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit when the client disconnects."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer in the form of the service's other refusals."""
        self._last_words(400, msg)

    def _expect(self) -> None:
        """Start or stop the time limit for headers, which runs from their first byte or from the connection."""
        is_due = self.conn.their_state is h11.IDLE
        if is_due and self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self._give_up)
        elif not is_due and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._last_words(408, "the headers arrived too slowly")

    def _last_words(self, status: int, why: str) -> None:
        line = json.dumps({"error": why}).encode() + b"\n"
        headers = [("content-type", "application/json"), ("content-length", str(len(line))), ("connection", "close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=line), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
