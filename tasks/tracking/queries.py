"""Queries to MLflow without its client, whose import is slower than most answers.

A local database is read as an SQLite file of exactly the installed MLflow's tables (`check_database`), a server over its REST interface. If
a server requires a login or has workspaces, or results are in another database, only MLflow's own client can answer.
"""

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from dml_core.errors import TrackingError
from tasks.environment import shown, without_secrets
from tasks.tracking.connection import SQLITE, check_available, client_login, open_database

PAGE_SIZE = 1000
TIMEOUT_SECONDS = 10
# With one of these in the environment a login or a workspace is sent with each request, as only MLflow's own client does in all cases.
CLIENT_VARIABLES = re.compile(r"MLFLOW_TRACKING_(?!URI$)\w+|MLFLOW_WORKSPACE")


def available_way(uri: str) -> Literal["database", "server", "client"]:
    """Return how MLflow at an address is queried.

    Raises:
        TrackingError: it cannot be queried.
    """
    check_available(uri)
    if uri.startswith(SQLITE):
        return "database"
    if not uri.startswith("http") or any(CLIENT_VARIABLES.fullmatch(name) for name in os.environ) or any(client_login()):
        return "client"
    return "server"


def query_database(uri: str, query: str, values: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the rows of a query to a local database; none if the file is missing or empty, as before the first run.

    Raises:
        TrackingError: it cannot be read.
    """
    path = Path(uri.removeprefix(SQLITE))
    if not path.exists() or path.stat().st_size == 0:
        return []
    try:
        with closing(open_database(path)) as database:
            return database.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise TrackingError(f"MLflow's database {path} cannot be read: {error}") from None


def query_server(uri: str, call: str, part: str, method: Literal["GET", "POST"] = "POST", **query: Any) -> Iterator[dict[str, Any]]:
    """Yield the entries named `part` of every page of a server's answers to a search.

    Raises:
        TrackingError: the server does not answer, or answers with an error.
    """
    import requests

    address, query = f"{uri.rstrip('/')}/api/2.0/mlflow/{call}", {"max_results": PAGE_SIZE, **query}
    while True:
        values: dict[str, Any] = {"params" if method == "GET" else "json": query}
        try:
            answer = requests.request(method, address, timeout=TIMEOUT_SECONDS, **values)
            answer.raise_for_status()
            page = dict(answer.json())
        except requests.exceptions.SSLError as error:
            reason = re.search(r"certificate verify failed[^('\"]*", str(error))
            said = f"{reason[0].strip() if reason else 'no TLS connection'}; for an own authority set REQUESTS_CA_BUNDLE to its file"
            raise TrackingError(f"MLflow at {shown(uri)} cannot be used: {said}") from None
        except (requests.ConnectionError, requests.Timeout):
            raise TrackingError(f"MLflow at {shown(uri)} cannot be used: no answer") from None
        except (requests.RequestException, ValueError) as error:
            raise TrackingError(f"MLflow at {shown(uri)} cannot be used: {without_secrets(str(error)).splitlines()[0][:200]}") from None
        yield from page.get(part, [])
        if not page.get("next_page_token"):
            return
        query["page_token"] = page["next_page_token"]
