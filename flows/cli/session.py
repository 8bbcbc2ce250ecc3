"""Helpers of several verbs: open the project, start Prefect's server during imports."""

import atexit
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from flows.local_database import set_aside_if_damaged
from tasks import environment
from tasks.environment import STACK_ENV, Project, overridden, stack_environment
from tasks.processes import watch_children
from tasks.start_times import StartTimes

PREFECT_SERVER = {"prefect.server.api.server": "Prefect's server"}


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


def announced_start(project: Project, what: str, text: str) -> AbstractContextManager[None]:
    """Print a start with the time that it took last on this machine; return a context that measures it."""
    starts = StartTimes(project.state, say)
    say(f"{text}{starts.about(what)}")
    return starts.timed(what)


def say(line: str) -> None:
    """Print a line on standard error at once."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def prefect_starting(project: Project) -> Iterator[None]:
    """Let Prefect start its server while the body imports what the flow needs: both take seconds, on different cores.

    Prefect itself is imported first: two concurrent imports share one interpreter lock, and the server would wait for both.
    """
    with announced_start(project, "Prefect", "starting Prefect and loading the libraries"), _server_starting():
        yield


@contextmanager
def _server_starting() -> Iterator[None]:
    from prefect import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME

    if not PREFECT_API_URL.value():
        set_aside_if_damaged(PREFECT_HOME.value())
        import prefect.server.api.server  # noqa: F401  the client would import it in the thread

    def start() -> None:
        get_client(sync_client=True)
        if not PREFECT_API_URL.value():
            atexit.register(watch_children(PREFECT_SERVER))  # called before Prefect's own handler, which stops the server

    thread = threading.Thread(target=start, name="prefect-start")
    thread.start()
    try:
        yield
    finally:
        thread.join()
