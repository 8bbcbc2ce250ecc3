"""The `dml` command itself: its groups of verbs, what all of them share, and how an error is told."""

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.table import Table

    from tasks.environment import Project


class ListByDefault(TyperGroup):
    """A group of verbs that lists where none is named: what is no verb of it is the list's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, with the verb `list` put in front where there is none."""
        named = args and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else ["list", *args])


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
tables_app = typer.Typer(cls=ListByDefault, help="List and show the tables and figures of the five papers.")
stack_app = typer.Typer(help="Start and end a team's servers on this machine.", no_args_is_help=True)
models_app = typer.Typer(cls=ListByDefault, help="List, promote and export trained networks.")
data_app = typer.Typer(help="Bring datasets in, check them, pack them, look at them.", no_args_is_help=True)


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


SUPERVISED = {"reproduce", "run", "serve", "tune"}
SERVE_GRACE_SECONDS = 8.0  # for the requests that are worked on
PREFECT_SERVER = {"prefect.server.api.server": "Prefect's server"}


def main() -> None:
    """Run the command; what a person can mend is one line on standard error and exit code 2.

    A flow runs in a process of its own, beside one that ends what it started (`flows.cli.supervisor`). An error of our own is exit code 1:
    one line, and the traceback in a log file.
    """
    from dml_core.errors import DmlError

    try:
        log = _supervised() if set(sys.argv[1:2]) & SUPERVISED and "--help" not in sys.argv else None
        try:
            app()
        except Exception as error:
            if isinstance(error, DmlError) or log is None:
                raise
            sys.exit(_tell(error, log))
    except DmlError as error:
        from tasks.environment import without_secrets

        print(f"error: {without_secrets(str(error))}", file=sys.stderr)
        sys.exit(2)


def _supervised() -> "Path | None":
    """Go on in a process of its own, whose log file this is; without one where there is no project, which the command itself will say."""
    from dml_core.errors import ConfigError, StoreError
    from flows.cli.supervisor import supervise
    from tasks.environment import find_project

    try:
        state = find_project().state
        if sys.argv[1] == "serve":
            return supervise(state / "logs", SERVE_GRACE_SECONDS, "the same command starts it again")
        return supervise(state / "logs")
    except ConfigError:
        return None
    except OSError as error:
        raise StoreError(f"{state}: cannot be written ({error.strerror}); set DML_STATE to a folder that can") from None


def _tell(error: Exception, log: "Path") -> int:
    """Say in one line what was not foreseen, with the traceback in the log, and return the exit code."""
    import os
    import traceback

    from flows.cli.supervisor import BUG
    from tasks.environment import shown, without_secrets

    with log.open("a") as file:
        file.write(without_secrets("".join(traceback.format_exception(error))))
    api = os.environ.get("PREFECT_API_URL")
    if api and _is_of_connection(error):
        what = f"Prefect's server at {shown(api)} does not answer; start it, or unset PREFECT_API_URL"
        print(f"error: {what}; details in {log}", file=sys.stderr)
        return 2
    print(f"error: unforeseen {type(error).__name__}, the traceback is in {log}", file=sys.stderr)
    return BUG


def _is_of_connection(error: BaseException | None) -> bool:
    """Whether an error comes from a server that is not there: one of httpx, which Prefect's client calls with, or caused by one."""
    while error is not None:
        if type(error).__module__.partition(".")[0] in ("httpx", "httpcore"):
            return True
        error = error.__cause__ or error.__context__
    return False


def open_project() -> "Project":
    """The project around the working directory, with the environment set for what is imported next.

    Where the local stack is used a line says so.
    """
    import logging

    from tasks.environment import open_project as find_and_open

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # who calls by it says in one line what came of its attempts
    project = find_and_open()
    used = stack_used(project)
    if used:
        print(f"note: {used}", file=sys.stderr)
    return project


def stack_used(project: "Project") -> str | None:
    """In one line, that the local stack's servers are used, and which settings of the user come before the stack's."""
    import os

    from tasks.environment import STACK_ENV, stack_environment

    named = stack_environment(project.state)
    if not named:
        return None
    own = sorted(name for name, value in named.items() if os.environ.get(name) != value)
    beside = f"; your own settings come first: {', '.join(own)}" if own else ""
    return f"using the local stack ({project.state / STACK_ENV}){beside}; `dml stack down` ends it"


@contextmanager
def prefect_starting() -> "Iterator[None]":
    """Have Prefect start its server while the body imports what the flow needs: both take seconds, on different cores.

    Prefect itself is imported first: two imports beside each other share one interpreter lock, and the server would wait for both.
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
            atexit.register(watch_children(PREFECT_SERVER))  # called before Prefect's own, which stops the server

    thread = threading.Thread(target=start, name="prefect-start")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def print_table(table: "Table") -> None:
    """Print a table as wide as the terminal allows, or in a pipe as wide as it is."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 1000).print(table)
