"""moto's S3 server for those who know its user: `S3_USER=... python -m tasks.stack.s3_server --host HOST --port PORT`.

moto checks no login. Here the user's name is a secret that each request of an S3 client carries, and that neither pages in a browser nor
other users of the machine know. Only moto's own page, which shows that the server runs, needs none.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any


def main() -> None:
    """Serve until the process is ended."""
    from moto import server

    user, running = os.environ["S3_USER"], ("GET", "/moto-api/")

    class ForItsUser(server.DomainDispatcherApplication):  # type: ignore[misc]
        def __call__(self, request: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            header, query = request.get("HTTP_AUTHORIZATION", ""), f"{request['QUERY_STRING']}&"  # which signed addresses have
            is_known = f"Credential={user}/" in header or f"Credential={user}%2F" in query or f"AWSAccessKeyId={user}&" in query
            if is_known or (request["REQUEST_METHOD"], request["PATH_INFO"]) == running:
                answer: Iterable[bytes] = super().__call__(request, start_response)
                return answer
            start_response("403 Forbidden", [("Content-Type", "text/plain"), ("Connection", "close")])
            return [b"an S3 request without this server's user"]

    server.DomainDispatcherApplication = ForItsUser
    server.main()


if __name__ == "__main__":
    main()
