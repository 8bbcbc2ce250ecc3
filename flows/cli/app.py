"""The verbs of the `dml` command, each in a module that is imported when the verb is called or its own help is shown.

These modules import at their top what takes a fraction of a second. What takes seconds (torch, MLflow, Ray, Prefect) is imported in the
verb that needs it: help, completion and errors come at once, and `open_project` has set the environment that the libraries read at import.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Annotated, Any, TypeVar, cast

import typer
from typer._click.core import Context
from typer._click.exceptions import UsageError
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_group

from dml_core.errors import ConfigError

GROUPS = {  # title in the help -> verb -> its module and the first line of its help
    "Train": {
        "reproduce": ("run", "Run the comparison of params.yaml, or tables of the papers."),
        "run": ("run", "Run one variant on one dataset with one seed."),
        "tune": ("tune", "Search a row's settings on folds of the training classes."),
    },
    "Look at results": {
        "compare": ("tracking", "Show a comparison's variants side by side, best first."),
        "look": ("report", "Write pages to inspect a run or a comparison."),
        "ui": ("tracking", "Show a comparison in MLflow, best variant first."),
    },
    "Use networks": {
        "models": ("models", "List, promote and export trained networks."),
        "embed": ("models", "Embed any images with a trained network."),
        "evaluate": ("scores", "Score embeddings from files with every metric."),
        "index": ("search", "Build, change and show indexes of images."),
        "search": ("search", "Find the images of an index that are nearest to query images."),
        "serve": ("serve", "Embed and search over HTTP, with a page to drop an image on."),
    },
    "Watch results": {
        "verify": ("verify", "Train accepted results again, from nothing, and compare."),
        "accept": ("verify", "Make finished and verified results the reference."),
        "receipt": ("verify", "Write verified results to a file that others can reproduce."),
    },
    "Papers": {
        "tables": ("tables", "List and show the tables and figures of the five papers."),
        "plan": ("plan", "Print the runs of tables that `dml reproduce` would start."),
        "report": ("report", "Write the tables as pages for a browser."),
    },
    "Data": {
        "data": ("data", "Add, fetch, check, pack and show datasets."),
    },
    "Operations": {
        "doctor": ("stack", "Check the configuration and the servers, and print what to fix."),
        "stack": ("stack", "Start and stop a team's servers on this machine."),
        "gc": ("stack", "List finished steps that nothing uses, or delete them."),
        "sync": ("tracking", "Deliver records that wait because MLflow was down."),
    },
}
VERBS = {verb: entry for verbs in GROUPS.values() for verb, entry in verbs.items()}


TAKEN = "dml.taken"  # key of a context: the word that `FirstByDefault` takes for an argument of its default verb
Verb = TypeVar("Verb", bound=Callable[..., Any])


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

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs in their groups."""
        width = max(map(len, VERBS))
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{verb:{width}}", line) for verb, (_, line) in verbs.items()])

    def invoke(self, ctx: Any) -> Any:
        """Invoke as typer does, but hide errors of these two kinds, after which it would exit with 1."""
        try:
            return super().invoke(ctx)
        except (EOFError, BrokenPipeError) as error:
            raise HiddenError from error


class OnceEach(TyperCommand):
    """A verb that refuses an option of one value that is given twice: only the last value would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does, after a check of the words."""
        *_, given = self.make_parser(ctx).parse_args(args=list(args))
        if not ctx.resilient_parsing:
            for option in given:
                if isinstance(option, TyperOption) and not (option.multiple or option.is_flag) and given.count(option) > 1:
                    ctx.fail(f"{option.opts[0]} is given {given.count(option)} times, and takes one value.")
        return super().parse_args(ctx, args)


class App(typer.Typer):
    """An app whose verbs are `OnceEach`."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Verb], Verb]:
        """Register a verb, as typer does."""
        return super().command(name, cls=OnceEach, **settings)


class FirstByDefault(TyperGroup):
    """A group whose first verb is the default: other first words are that verb's arguments. Its help has that verb's options."""

    @property
    def default(self) -> tuple[str, Any]:
        """Name and command of the default verb."""
        return next(iter(self.commands.items()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default verb if none is given, then parse as typer does. Completion of the first word needs none."""
        is_named = args[0] in {*self.commands, "--help"} if args else self.no_args_is_help or ctx.resilient_parsing
        ctx.meta[TAKEN] = "" if is_named or not args else args[0]
        return super().parse_args(ctx, args if is_named else [self.default[0], *args])

    def invoke(self, ctx: Any) -> Any:
        """Invoke as typer does; an error after a misspelt verb, which was taken for an argument, ends with the nearest verb."""
        try:
            return super().invoke(ctx)
        except (UsageError, ConfigError) as error:
            from dml_core.config import nearest_hint

            hint = nearest_hint(ctx.meta[TAKEN], self.commands)
            if not hint:
                raise
            message = error.format_message() if isinstance(error, UsageError) else str(error)
            raise ConfigError(f"{message.rstrip('.')}; '{ctx.meta[TAKEN]}' is no verb of {ctx.command_path}{hint}") from None

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Offer the verbs, and what the default verb offers."""
        name, verb = self.default
        own = verb.shell_complete(Context(verb, info_name=name, parent=ctx), incomplete)
        return list({item.value: item for item in [*super().shell_complete(ctx, incomplete), *own]}.values())

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage of the default verb, then that of the others."""
        name, verb = self.default
        formatter.write_usage(ctx.command_path, " ".join([f"[{name}]", *verb.collect_usage_pieces(Context(verb, parent=ctx))]))
        formatter.write_usage(ctx.command_path, self.subcommand_metavar, prefix=" " * len("Usage: "))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs, then the arguments and options of the default verb."""
        name, verb = self.default
        self.format_commands(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(f"The default verb is {name}.")
        verb.format_options(Context(verb, parent=ctx), formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples of the default verb."""
        self.default[1].format_epilog(ctx, formatter)


def examples(*commands: str) -> str:
    """Return the end of a verb's help: complete commands, a line each, which are not wrapped."""
    return "\n".join(["\b", "Examples:" if len(commands) > 1 else "Example:", *(f"  {command}" for command in commands)])


app = App(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=examples("dml reproduce --dataset fashion-mnist", "dml compare fashion-mnist"),
)


@cache
def load_verb(verb: str) -> Any:
    """Import a verb's module, which adds it to `app`, and return its command or group."""
    import_module(f"flows.cli.{VERBS[verb][0]}")
    return cast(Verbs, get_group(app)).loaded[verb]


def new_group(verb: str, **settings: Any) -> typer.Typer:
    """Add a group of verbs to `app`; its module then adds the verbs."""
    group = App(help=VERBS[verb][1], **settings)
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
