"""The verbs of the `dml` command, each in a module that is imported when the verb is called or its own help is shown.

These modules import at their top what takes a fraction of a second. What takes seconds (torch, MLflow, Ray, Prefect) is imported in the
verb that needs it: help, completion and errors come at once, and `open_project` has set the environment that the libraries read at import.
"""

from functools import cache
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

VERBS = {  # verb -> its module and the first line of its help, in the order of the help
    "look": ("report", "Write pages to inspect a run or a comparison."),
    "embed": ("models", "Embed any images with a trained network."),
    "plan": ("plan", "Print the runs of tables that `dml reproduce` would start."),
    "report": ("report", "Write the tables as pages for a browser."),
    "reproduce": ("run", "Run the standing comparison, or tables of the papers."),
    "run": ("run", "Run one variant on one dataset with one seed."),
    "evaluate": ("scores", "Score embeddings from files with every metric."),
    "search": ("search", "Find the images of an index that are nearest to query images."),
    "serve": ("serve", "Embed and search over HTTP, with a page to drop an image on."),
    "doctor": ("stack", "Check the configuration and the servers, and print what to fix."),
    "gc": ("stack", "List finished steps that nothing uses, or delete them."),
    "compare": ("tracking", "Show a comparison's variants side by side, best first."),
    "sync": ("tracking", "Deliver records that wait because MLflow was down."),
    "ui": ("tracking", "Open the MLflow UI for the local results; stop it with Ctrl-C."),
    "tune": ("tune", "Search a row's settings on folds of the training classes."),
    "index": ("search", "Build and show indexes: dml index MODEL SOURCE -o INDEX."),
    "tables": ("tables", "List and show the tables and figures of the five papers."),
    "models": ("models", "List, promote and export trained networks."),
    "data": ("data", "Add, fetch, check, pack and show datasets."),
    "stack": ("stack", "Start and stop a team's servers on this machine."),
}


class HiddenError(Exception):
    """Carries, as its cause, an error that typer would turn into an exit code."""


class Verbs(TyperGroup):
    """All verbs of `dml`, listed from `VERBS`. Their errors propagate unchanged, to be reported in one place (`flows.cli.exits`).

    Attributes:
        loaded: the verbs whose modules were imported before this group was built.
    """

    def __init__(self, *, commands: Any, **settings: Any) -> None:
        self.loaded = commands
        super().__init__(commands={verb: TyperCommand(verb, short_help=line) for verb, (_, line) in VERBS.items()}, **settings)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a verb as typer does, then load it."""
        verb, _, rest = super().resolve_command(ctx, args)
        return verb, load_verb(verb) if verb else None, rest

    def invoke(self, ctx: Any) -> Any:
        """Invoke as typer does, but hide errors of these two kinds, after which it would exit with 1."""
        try:
            return super().invoke(ctx)
        except (EOFError, BrokenPipeError) as error:
            raise HiddenError from error


class FirstByDefault(TyperGroup):
    """A group whose first verb is the default: other first words are that verb's arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default verb if none is given, then parse as typer does."""
        is_named = args[0] in {*self.commands, "--help"} if args else self.no_args_is_help
        return super().parse_args(ctx, args if is_named else [next(iter(self.commands)), *args])


app = typer.Typer(cls=Verbs, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@cache
def load_verb(verb: str) -> Any:
    """Import a verb's module, which adds it to `app`, and return its command or group."""
    import_module(f"flows.cli.{VERBS[verb][0]}")
    return cast(Verbs, get_group(app)).loaded[verb]


def new_group(verb: str, **settings: Any) -> typer.Typer:
    """Add a group of verbs to `app`; its module then adds the verbs."""
    group = typer.Typer(help=VERBS[verb][1], **settings)
    app.add_typer(group, name=verb)
    return group


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # takes as long as the rest of --help

        print(f"dml-repro {version('dml-repro')}")
        raise typer.Exit


@app.callback()
def dml(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Reproduce, compare and serve deep metric learning systems."""
