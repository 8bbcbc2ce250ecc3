"""The `dml` command: its groups of verbs, and shared helpers."""

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from tasks.environment import Project


class ListByDefault(TyperGroup):
    """A group of verbs whose default is `list`: other first words are the list's arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the verb `list` if none is given, then parse as click does."""
        named = args and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else ["list", *args])


class HiddenError(Exception):
    """Carries, as its cause, an error that typer would turn into an exit code."""


class Verbs(TyperGroup):
    """All verbs of `dml`. Their errors propagate unchanged, to be reported in one place (`flows.cli.exits`)."""

    def invoke(self, ctx: Any) -> Any:
        """Invoke as typer does, but hide errors of these two kinds, after which it would exit with 1."""
        try:
            return super().invoke(ctx)
        except (EOFError, BrokenPipeError) as error:
            raise HiddenError from error


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
tables_app = typer.Typer(cls=ListByDefault, help="List and show the tables and figures of the five papers.")
stack_app = typer.Typer(help="Start and stop a team's servers on this machine.", no_args_is_help=True)
models_app = typer.Typer(cls=ListByDefault, help="List, promote and export trained networks.")
data_app = typer.Typer(help="Add, fetch, check, pack and show datasets.", no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"dml-repro {version('dml-repro')}")
        raise typer.Exit


@app.callback()
def dml(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Reproduce, compare and serve deep metric learning systems."""


PREFECT_SERVER = {"prefect.server.api.server": "Prefect's server"}


def open_project() -> "Project":
    """Return the project around the working directory, with the environment set for later imports.

    A line reports the use of the local stack.
    """
    import logging

    from tasks.environment import open_project as find_and_open

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # its callers report the result of retries in one line
    project = find_and_open()
    used = stack_used(project)
    if used:
        print(f"note: {used}", file=sys.stderr)
    return project


def stack_used(project: "Project") -> str | None:
    """Return a line on the use of the local stack's servers and the user's settings that override it, or None."""
    import os

    from tasks.environment import STACK_ENV, stack_environment

    named = stack_environment(project.state)
    if not named:
        return None
    own = sorted(name for name, value in named.items() if os.environ.get(name) != value)
    beside = f"; overridden by your own settings: {', '.join(own)}" if own else ""
    return f"using the local stack ({project.state / STACK_ENV}){beside}; `dml stack down` ends it"


@contextmanager
def prefect_starting() -> "Iterator[None]":
    """Let Prefect start its server while the body imports what the flow needs: both take seconds, on different cores.

    Prefect itself is imported first: two concurrent imports share one interpreter lock, and the server would wait for both.
    """
    import atexit
    import threading

    from prefect import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME

    from flows.local_database import set_aside_if_damaged
    from tasks.processes import watch_children

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


def print_table(table: "Table") -> None:
    """Print a table fitted to the terminal, or in a pipe at its full width."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 1000)
    with console.capture() as text:  # rich itself ends the process with 1 where the reader of a pipe has closed it
        console.print(table)
    sys.stdout.write(text.get())
