"""Helpers of several verbs: open the project, start Prefect's server during imports."""

import atexit
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.local_database import copy_empty_database, keep_empty_database, set_aside_if_damaged
from flows.local_server import LocalServer
from tasks import environment
from tasks.environment import STACK_ENV, Project, overridden, prefect_server, stack_environment
from tasks.processes import watch_children
from tasks.start_times import StartTimes

PREFECT_SERVER = {"flows.local_server": "Prefect's server"}


def open_project() -> Project:
    """Return the project around the working directory, with the environment set for later imports.

    A line reports the use of the local stack.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # its callers report the result of retries in one line
    project = environment.open_project()
    if stack := stack_environment(project.state):
        names = ", ".join(overridden(stack))
        override = f"; overridden by your own settings: {names}" if names else ""
        print(f"note: using the local stack ({project.state / STACK_ENV}){override}; `dml stack down` ends it", file=sys.stderr)
    return project


def open_project_of(model: str) -> Project | None:
    """Open the project in which a model is looked up; None for a network's own folder, which needs none."""
    from dml_core.network_description import DESCRIPTION_FILE

    return None if (Path(model) / DESCRIPTION_FILE).is_file() else open_project()


def say(line: str) -> None:
    """Print a line on standard error at once."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def prefect_starting(project: Project) -> Iterator[None]:
    """Start Prefect's server, unless one is named, while the body imports what the flow needs, on another core.

    Only Prefect learns the address of this server: `tasks.environment.prefect_server` still returns None.
    """
    gc.disable()  # what the libraries create stays, and garbage collection would search it again and again
    try:
        with _server_starting(project):
            yield
    finally:
        gc.freeze()  # later collections do not search it either
        gc.enable()


@contextmanager
def _server_starting(project: Project) -> Iterator[None]:
    starts = StartTimes(project.state, say)
    say(f"starting Prefect and loading the libraries{starts.about('Prefect')}")
    with starts.timed("Prefect"):
        if prefect_server() is not None:
            yield
            return
        home = Path(os.environ["PREFECT_HOME"])
        set_aside_if_damaged(home)
        is_copied = copy_empty_database(home)
        server = LocalServer()
        os.environ["PREFECT_API_URL"] = server.url
        try:
            from prefect.context import refresh_global_settings_context

            refresh_global_settings_context()  # if an earlier import has read the environment
        finally:
            del os.environ["PREFECT_API_URL"]
        yield
        server.wait()
        atexit.register(watch_children(PREFECT_SERVER))  # called before the server is stopped
        if not is_copied:
            keep_empty_database(home)
