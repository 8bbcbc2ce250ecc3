"""A server that receives what a webhook posts."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOGIN = "Basic dXNlcjpwYXNzd29yZA=="  # user:password; paths that end in /events require it


@contextmanager
def webhook_receiver() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the address of an HTTP server, and the messages that were posted to it."""
    posted: list[dict[str, str]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path.endswith("/events") and self.headers["Authorization"] != LOGIN:
                self.send_error(401)
                return
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", posted
    finally:
        server.shutdown()
        server.server_close()
