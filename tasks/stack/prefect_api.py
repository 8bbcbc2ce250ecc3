"""Requests to Prefect's server."""

import os

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from tasks.environment import login

# Prefect answers 503 and has done nothing while its database is locked; its own clients ask again, too.
_WHILE_LOCKED = Retry(
    total=5, connect=0, read=0, redirect=0, other=0, status_forcelist=[503], allowed_methods=None, backoff_factor=0.5, raise_on_status=False
)


def prefect_session() -> requests.Session:
    """Return a session with the login of Prefect's clients (`PREFECT_API_AUTH_STRING` or `PREFECT_API_KEY`).

    It repeats a request that is answered with 503, five times in 15 seconds.
    """
    session = requests.Session()
    session.headers.update(login(os.environ.get("PREFECT_API_AUTH_STRING"), os.environ.get("PREFECT_API_KEY")))
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=_WHILE_LOCKED))
    return session
