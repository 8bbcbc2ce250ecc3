"""Access control before the application: who may send requests, how large and how slowly; every refusal is one line.

This runs in the process that owns the socket, so that bodies are counted as they arrive and slow clients are dropped. A request reaches the
application only when it is complete, so a replica never waits for a client.
"""

import asyncio
import hmac
import math
import time
import traceback

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tasks.serving import limits, metrics

OPEN_PATHS = ("/", "/docs", "/openapi.json", "/v1/health")  # a token would protect nothing there
KNOWN_PATHS = (*OPEN_PATHS, "/v1/embed", "/v1/search", "/v1/neighbours", "/metrics")
LINGER_SECONDS = 2.0  # a refused client reads its answer only after sending for a while
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """An ASGI application that checks requests before another one.

    Args:
        token: token that requests must contain (`Authorization: Bearer ...`), or None.
        hosts: host names that requests, and the pages that send them, may have, or None for any: on loopback this blocks pages of other
            sites, also those whose name was made to resolve to this machine.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._token = token
        self._hosts = hosts
        self._num_working = self._num_held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        begun = time.perf_counter()
        status = 500
        body = bytearray()

        async def respond(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        metrics.OPEN.inc()
        try:
            self._check_headers(scope["path"], Headers(scope=scope))
            await self._read(receive, body)
            await self._work(scope, _replay(bytes(body), receive), respond)
        except HTTPException as error:
            await _refuse(error, Headers(scope=scope), receive, respond)
        except _GoneError:
            status = 499
        except Exception:  # noqa: BLE001 - the application has answered with one line, and the log gets the rest
            metrics.ERRORS.inc()
            traceback.print_exc()
        finally:
            self._num_held_bytes -= len(body)
            metrics.OPEN.dec()
            path = scope["path"] if scope["path"] in KNOWN_PATHS else "other"
            metrics.REQUESTS.labels(path, status).inc()
            metrics.REQUEST_SECONDS.labels(path).observe(time.perf_counter() - begun)

    def _check_headers(self, path: str, headers: Headers) -> None:
        """Check the client, and the size stated in the headers."""
        origins = [origin.rpartition("//")[2] for origin in headers.getlist("origin")]  # "null" of pages that hide theirs
        if self._hosts is not None and not {*map(_host, [headers.get("host", ""), *origins])} <= self._hosts:
            raise HTTPException(403, "unknown Host or Origin header; listening on loopback, the service answers only to localhost")
        if self._token is not None and path not in OPEN_PATHS:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip(" ").encode("latin-1"), self._token.encode()):
                raise HTTPException(401, "a token is required: send it as the header Authorization: Bearer TOKEN")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limits.BODY_BYTES:
            raise HTTPException(413, f"request body of {int(length)} bytes; the limit is {limits.BODY_BYTES}")

    async def _read(self, receive: Receive, body: bytearray) -> None:
        """Read the whole body, unless it is too large or too slow, or too much is being received at a time."""
        until = time.monotonic() + limits.BODY_SECONDS
        more = True
        while more:
            try:
                async with asyncio.timeout(min(limits.QUIET_SECONDS, until - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the request body arrived too slowly") from None
            if message["type"] == "http.disconnect":
                raise _GoneError
            piece = message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) + len(piece) > limits.BODY_BYTES:
                raise HTTPException(413, f"request body of more than {limits.BODY_BYTES} bytes")
            if self._num_held_bytes + len(piece) > limits.HELD_BYTES:
                raise HTTPException(503, "too much data is being received; retry in a moment")
            body += piece
            self._num_held_bytes += len(piece)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer. A request counts only from here on: requests still being received block no others."""
        if self._num_working >= limits.REQUESTS:
            raise HTTPException(503, "too many concurrent requests; retry in a moment")
        self._num_working += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_working -= 1


class _GoneError(Exception):
    """The client has disconnected."""


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` for a request whose body has already been read."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _refuse(error: HTTPException, headers: Headers, receive: Receive, send: Send) -> None:
    """Answer with one line, and close. First read briefly what the client still sends: if closed at once, it may lose the answer."""
    response = limits.refusal(error)
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    if headers.get("expect", "").lower() != "100-continue":  # else the client waits for permission to send its body
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
                    pass
        except TimeoutError:
            pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _host(value: str) -> str:
    """Return the name in a Host header, or after the scheme of an Origin, without its port."""
    text = value.lower()
    return text[: text.index("]") + 1] if text.startswith("[") and "]" in text else text.partition(":")[0]


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with limits on the time for sending a request's headers and for reading an answer, which uvicorn lacks."""

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for headers when a client connects."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Update the time limit when bytes arrive: the headers may now be complete."""
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limits when the client disconnects."""
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the time limits for reading when a client leaves an answer unread, which holds memory and its next request's place."""
        super().pause_writing()
        self._expect_reading(self.loop.time() + limits.BODY_SECONDS)

    def resume_writing(self) -> None:
        """Stop the time limits for reading when the client has read."""
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer in the form of the service's other refusals."""
        self._answer_and_close(HTTPException(400, msg))

    def _expect(self) -> None:
        """Start or stop the time limit for headers, which runs from their first byte or from the connection."""
        is_due = self.conn.their_state is h11.IDLE
        if is_due and self._timer is None:
            self._timer = self.loop.call_later(limits.HEAD_SECONDS, self._give_up)
        elif not is_due and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expect_reading(self, until: float, num_before: float = math.inf) -> None:
        """Disconnect a client that has read nothing since the last call, or that is too slow."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread >= num_before or self.loop.time() > until:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(limits.QUIET_SECONDS, self._expect_reading, until, num_unread)

    def _give_up(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._answer_and_close(HTTPException(408, "the headers arrived too slowly"))

    def _answer_and_close(self, error: HTTPException) -> None:
        response = limits.refusal(error)
        response.headers["connection"] = "close"
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            start = h11.Response(status_code=response.status_code, headers=response.raw_headers)
            for event in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
