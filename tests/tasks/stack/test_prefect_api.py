"""Requests to Prefect's server: it answers 503 while its database is locked."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tasks.stack.prefect_api import prefect_session

BODY = b'{"a": 1}'
asked: list[tuple[str, bytes]] = []


class LockedTwice(BaseHTTPRequestHandler):
    """Answers 503 twice, then 200."""

    def answer(self) -> None:
        asked.append((self.command, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(503 if len(asked) < 3 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815  names of http.server

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def locked() -> Iterator[str]:
    asked.clear()
    with HTTPServer(("127.0.0.1", 0), LockedTwice) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api/deployments"
        server.shutdown()


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "DELETE"])
def test_a_request_is_repeated_until_the_database_is_free(method: str, locked: str) -> None:
    assert prefect_session().request(method, locked, data=BODY).status_code == 200
    assert asked == [(method, BODY)] * 3
