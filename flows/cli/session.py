"""Helpers of several verbs: open the project, start Prefect's server during imports."""

import atexit
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import dml_core
import flows
import tasks
from dml_core.errors import ConfigError, printable
from flows.local_server import LocalServer
from tasks import environment
from tasks.environment import STACK_ENV, Project, overridden, prefect_server, stack_environment
from tasks.processes import watch_children
from tasks.start_times import StartTimes

if TYPE_CHECKING:  # it imports torch
    from dml_core.trained import TrainedModel
    from tasks.models.sources import Images

PREFECT_SERVER = {"flows.local_server": "Prefect's server"}


def open_project() -> Project:
    """Return the project around the working directory, with the environment set for later imports.

    A line reports the use of the local stack.

    Raises:
        ConfigError: as `check_code`.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # its callers report the result of retries in one line
    project = check_code(environment.find_project())
    environment.set_environment(project)
    if stack := stack_environment(project.state):
        names = ", ".join(overridden(stack))
        override = f"; overridden by your own settings: {names}" if names else ""
        _say_once(f"note: using the local stack ({project.state / STACK_ENV}){override}; `dml stack down` ends it")
    return project


def check_code(project: Project) -> Project:
    """Return the project after checking that a checkout runs its own code: results name its commit, and `dvc.lock` hashes its files.

    A project without code, a folder with `params.yaml`, may be used with any.

    Raises:
        ConfigError: the running code is that of another checkout, as of the one whose environment `dml` is from, or a copy, as of the
            library after `pip install ./dml_core`.
    """
    if not (project.root / "flows" / "chain.py").is_file():
        return project
    for running in (Path(package.__path__[0]) for package in (flows, tasks, dml_core)):
        own = project.root / running.name
        if own.is_dir() and not own.samefile(running):
            if ".dvc/tmp/exps/" in str(project.root):
                raise ConfigError(
                    "temporary workspaces of dvc exp run (--temp, --queue) are not supported; omit these, or: dml reproduce --set"
                )
            raise ConfigError(
                f"{project.root} has its own code, but this command runs that of {running.parent}; run {project.root}/.venv/bin/dml "
                f"(made there by: rm -rf .venv; make .venv/.done), or set PYTHONPATH={project.root}"
            )
    return project


def open_model(text: str, device: str | None = None) -> "tuple[Path, TrainedModel]":
    """Open a trained network by one of its names; return its folder, too. A network's own folder needs no project."""
    from dml_core.network_description import DESCRIPTION_FILE

    project = None if (Path(text) / DESCRIPTION_FILE).is_file() else open_project()
    from dml_core.trained import load_model
    from tasks.models.lookup import resolve_model

    folder = resolve_model(text, project)
    return folder, load_model(folder, device)


def say_boxes(network: "TrainedModel", images: "Images") -> None:
    """Say that images have boxes which the network does not use, or lack boxes on whose contents it was trained."""
    num_images, num_boxes = len(images), sum(box is not None for box in images.boxes or ())
    if network.description.transform.crop_to_box:
        if num_boxes < num_images:
            of = f"{num_images - num_boxes:,} of {num_images:,} images"
            say(f"note: the network was trained on the contents of boxes; {of} have no box and are embedded whole")
    elif num_boxes:
        say("note: the boxes of the list are not used; the network embeds whole images")


def print_lines(*lines: object, flush: bool = False) -> None:
    """Print lines on standard output, with control characters escaped, which texts of files, servers and other people may have."""
    print(*(printable(str(line)) for line in lines), sep="\n", flush=flush)


def say(line: str) -> None:
    """Print a line on standard error at once."""
    print(printable(line), file=sys.stderr, flush=True)


_say_once = cache(say)  # for verbs that open the project more than once


class PrefectStart:
    """The start of Prefect's server, unless one is named, on another core than the command's imports.

    Only Prefect learns the address of this server: `tasks.environment.prefect_server` still returns None.
    """

    def __init__(self, project: Project) -> None:
        self._starts = StartTimes(project.state, say)
        self._server: LocalServer | None = None

    def begin(self) -> None:
        """Start the server's process, once."""
        if self._server is None and prefect_server() is None:
            self._server = LocalServer()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load what the flow needs, in the body, then wait for the server."""
        say(f"starting Prefect and loading the libraries{self._starts.about('Prefect')}")
        gc.disable()  # what the libraries create stays, and garbage collection would search it again and again
        try:
            with self._starts.timed("Prefect"):
                self.begin()
                if self._server is not None:
                    _name_to_prefect(self._server)
                yield
                if self._server is not None:
                    self._server.wait()
        finally:
            gc.freeze()  # later collections do not search it either
            gc.enable()
        if self._server is not None:
            atexit.register(watch_children(PREFECT_SERVER))  # called before the server is stopped


def _name_to_prefect(server: LocalServer) -> None:
    named = {"PREFECT_API_URL": server.url, "PREFECT_API_AUTH_STRING": server.login}
    before = {name: value for name, value in os.environ.items() if name in named}
    os.environ.update(named)
    try:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()  # if an earlier import has read the environment
    finally:
        for name in named:
            del os.environ[name]
        os.environ.update(before)
